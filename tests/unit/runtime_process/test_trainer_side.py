"""What stands around a trainer: its arguments, its progress, its stacks, and its forks."""

import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

import stepkeeper
import stepkeeper.torch_xla as xc
from stepkeeper import CheckpointManager, Options, StepkeeperError, StorageError, errors
from stepkeeper.companion.progress import Progress, select_stored_metrics
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import SETTINGS_FILE_NAME, EveryInterval, Interval, Report, Settings
from stepkeeper.contract.report import MAX_METRICS, REPORT_LIMIT_BYTES
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import BadUriError
from stepkeeper.manager_arguments import ManagerArguments
from stepkeeper.policy import keep, save
from stepkeeper.storage.open import OPENERS
from stepkeeper.tier import TierPlace
from stepkeeper.training import environment as env
from stepkeeper.training.cloud.metadata_server import find_metadata_host
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_environ, pod_identity


def test_the_page_lists_each_error_that_a_manager_raises_or_what_it_is_a_case_of() -> None:
    elsewhere = (errors.ForeignStepsError, errors.PinFormatError, errors.PinLostError, errors.RefusedError)
    page = (Path(__file__).parents[3] / "docs/user/manager-reference.md").read_text(encoding="utf-8")
    rows = page.split("\n## Errors\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"`(\w+Error)`", rows)) - {"StepkeeperError"}
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, StepkeeperError) and kind is not StepkeeperError:
            cases = {each.__name__ for each in kind.__mro__}
            assert listed & cases or issubclass(kind, (*elsewhere, errors.VerifyError)), name
    assert issubclass(errors.UnknownOutcomeError, StorageError)


def test_paths_and_numbers_may_be_of_any_library(tmp_path: Path) -> None:
    manager = xc.CheckpointManager(tmp_path / "root", np.int64(3), np.int32(2), np.int64(1), np.int64(1))
    assert manager.base_path == f"{tmp_path}/root/"
    assert [manager.should_save(step) for step in range(4)] == [True, False, False, True]
    for number in (manager.save_interval, manager.max_to_keep):
        assert type(number) is int
    manager.close()


options: Any = Options
torch_xla: Any = partial(xc.CheckpointManager, "/nowhere")
best: Any = keep.BestN
last: Any = keep.LastN
max_age: Any = keep.MaxAge
every_n: Any = save.EveryNSteps
every: Any = save.EverySeconds
at: Any = save.AtSteps
continuous: Any = save.Continuous
auto: Any = save.Auto


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda: torch_xla(2.5),
            TypeError,
            "save_interval must be a whole number, not a value of type float",
        ),
        (lambda: torch_xla("10"), TypeError, "save_interval must be a whole number, not a value of type str"),
        (lambda: torch_xla(0), ValueError, "save_interval must be at least 1, not 0"),
        (lambda: torch_xla(10, -1), ValueError, "max_to_keep must be at least 0, not -1"),
        (lambda: torch_xla(10, None), TypeError, "max_to_keep must be a whole number"),
        (lambda: torch_xla(10, 0, 0), ValueError, "max_pending_async must be at least 1, not 0"),
        (lambda: options(max_pending=0), ValueError, "max_pending must be at least 1, not 0"),
        (
            lambda: options(max_pending="2"),
            TypeError,
            "max_pending must be a whole number, not .* of type str",
        ),
        (lambda: options(max_pending=None), TypeError, "max_pending must be a whole number, not .* NoneType"),
        (
            lambda: options(device_budget_bytes=-1),
            ValueError,
            "device_budget_bytes must be at least 0, not -1",
        ),
        (lambda: options(device_budget_bytes="1G"), TypeError, "device_budget_bytes must be a whole number"),
        (lambda: options(local_tier_bytes=-5), ValueError, "local_tier_bytes must be at least 1, not -5"),
        (
            lambda: options(take_over=1),
            TypeError,
            "take_over must be a job's namespace/name, True or .* not 1",
        ),
        (lambda: options(take_over=""), TypeError, "take_over must be a job's namespace/name"),
        (lambda: options(stacks_after_s=0), ValueError, "stacks_after_s must be a number .* greater than 0"),
        (
            lambda: options(stacks_after_s="x"),
            TypeError,
            "stacks_after_s must be a number, not .* of type str",
        ),
        (
            lambda: options(local_tier=1),
            TypeError,
            "local_tier must be the path of a folder, not .* of type int",
        ),
        (lambda: options(stop_on_notice="no"), TypeError, "stop_on_notice must be True or False, not 'no'"),
        (
            lambda: options(unsafe_single_writer=1),
            TypeError,
            "unsafe_single_writer must be True or False, not 1",
        ),
        (lambda: every_n(0), ValueError, "EveryNSteps.steps must be at least 1, not 0"),
        (lambda: every_n("x"), TypeError, "EveryNSteps.steps must be a whole number, not .* of type str"),
        (lambda: at(250), TypeError, r"write AtSteps\(\(250,\)\)"),
        (lambda: at(("3",)), TypeError, "each of AtSteps.steps must be a whole number, not .* of type str"),
        (lambda: at((3, -1)), ValueError, "each of AtSteps.steps must be at least 0, not -1"),
        (lambda: every(float("nan")), ValueError, "EverySeconds.seconds must be greater than 0, not nan"),
        (lambda: every("5m"), TypeError, "EverySeconds.seconds must be a number, not a value of type str"),
        (lambda: continuous(min_s=-1.0), ValueError, "Continuous.min_s must be at least 0, not -1.0"),
        (
            lambda: continuous(min_s="5"),
            TypeError,
            "Continuous.min_s must be a number, not a value of type str",
        ),
        (lambda: auto(min_s=10.0, max_s=9.0), ValueError, "Auto.min_s=10.0 is greater than Auto.max_s=9.0"),
        (lambda: auto(max_s=True), TypeError, "Auto.max_s must be a number, not a value of type bool"),
        (
            lambda: auto(background_share=1.5),
            ValueError,
            "Auto.background_share must be from 0 to 1, not 1.5",
        ),
        (lambda: keep.LastN(0), ValueError, "at least 1"),
        (lambda: keep.EveryNSteps(0), ValueError, "at least 1"),
        (lambda: keep.EverySeconds(0), ValueError, "at least 1"),
        (lambda: keep.MaxAge(-1), ValueError, "at least 1"),
        (lambda: last(2.5), TypeError, "whole number"),
        (lambda: max_age("1h"), TypeError, "whole number"),
        (lambda: best(0, "loss", "min"), ValueError, "at least 1"),
        (lambda: best(1, "loss", "least"), ValueError, "min"),
        pytest.param(lambda: best(2, "accuracy"), TypeError, "mode", id="by a guess it might keep the worst"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_at_once(
    make: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a fraction of a step": ({"save": 1.5}, TypeError, "save must be a number of steps or a policy"),
    "no steps": ({"save": 0}, ValueError, "save must be at least 1, not 0"),
    "a bool of steps": ({"save": True}, TypeError, "save must be a whole number, not a value of type bool"),
    "a class of policies": ({"save": save.EveryNSteps}, TypeError, "not <class .*EveryNSteps"),
    "a number in a policy": (
        {"save": save.AnyOf((save.AtSteps((1,)), 10))},  # type: ignore[arg-type]  # what is tested
        TypeError,
        "save must be .* not 10",
    ),
    "a policy of the other kind": ({"save": keep.LastN(5)}, TypeError, "stepkeeper.policy.save, not LastN"),
    "a bool of commits": ({"keep": True}, TypeError, "keep must be a whole number, not a value of type bool"),
    "no commits": ({"keep": False}, TypeError, "keep must be a whole number, not a value of type bool"),
    "a class of what is kept": ({"keep": keep.LastN}, TypeError, "keep must be .* not <class .*LastN"),
    "text for a number of commits": (
        {"keep": "3"},
        TypeError,
        "keep must be a number of commits or a policy .* not '3'",
    ),
    "no options": (
        {"options": None},
        TypeError,
        "options must be an Options value, not a value of type NoneType",
    ),
    "a dict of options": ({"options": {"max_pending": 2}}, TypeError, "options must be an Options value"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("is_jobs", [False, True], ids=["constructor", "from_env"])
def test_what_is_no_argument_is_refused_at_once(places: PodPaths, wrong: str, *, is_jobs: bool) -> None:
    (places.settings_folder / SETTINGS_FILE_NAME).write_bytes(
        Settings(
            uri=places.settings_folder.as_uri(), interval=Interval(every=EveryInterval(steps=1))
        ).to_json()
    )
    arguments, error, says = WRONG[wrong]
    construct: Any = partial(CheckpointManager, places.settings_folder)
    if is_jobs:
        construct = partial(CheckpointManager.from_env, _places=places)
    with pytest.raises(error, match=says):
        construct(**arguments)


def test_torch_xlas_manager_takes_the_options_that_messages_name(
    tmp_path: Path, given: list[ManagerArguments]
) -> None:
    options = Options(take_over="default/other", max_pending=3)
    xc.CheckpointManager(tmp_path, 10, 0, 2, chkpt_on_preemption=False, options=options)
    assert given[0].options == Options(take_over="default/other", max_pending=2, stop_on_notice=False)


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        (Path("gs://bucket/run"), "gs://bucket/run"),
        ("gs:/bucket/run", "gs://bucket/run"),
    ],
)
def test_a_uri_that_lost_a_slash_is_no_folder(path: str | Path, whole: str) -> None:
    with pytest.raises(BadUriError, match=f"pass '{whole}', a str"):
        CheckpointManager(path, save=10)
    with pytest.raises(BadUriError, match=f"pass '{whole}', a str"):
        stepkeeper.follow(str(path))


def test_no_path_is_refused() -> None:
    none: Any = None
    with pytest.raises(
        TypeError, match="path must be a URI or the path of a folder, not a value of type NoneType"
    ):
        CheckpointManager(none)


def test_a_root_in_the_memory_of_this_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPENERS, "memory", raising=False)  # which tests of one process may have put there
    with pytest.raises(
        BadUriError, match=r"'memory://run' is in the memory of one process.* temporary folder"
    ):
        CheckpointManager("memory://run", save=10)


def test_a_home_folder_is_written_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("~/root", save=10, options=Options(local_tier="~/disk")) as manager:
        manager.save(1, {"w": torch.ones(2)})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "root"]


@pytest.mark.parametrize("tier", ["gs://bucket/tier", "file:///disk", Path("gs://bucket/tier")])
def test_a_local_tier_is_a_folder(tmp_path: Path, tier: str | Path) -> None:
    with pytest.raises(BadUriError, match=r"on this host's own disk|pathlib removes a slash"):
        CheckpointManager(str(tmp_path), save=10, options=Options(local_tier=tier))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodPaths:
    for name, value in pod_environ(pod_identity()).items():
        monkeypatch.setenv(name, value)
    settings = Settings(uri="gs://bucket/run", interval=Interval(every=EveryInterval(steps=1)))
    (tmp_path / SETTINGS_FILE_NAME).write_bytes(settings.to_json())
    return PodPaths(settings_folder=tmp_path, local_tier_folder=tmp_path / "volume")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[ManagerArguments]:
    """Return the arguments that a manager is constructed with, without constructing it."""
    found: list[ManagerArguments] = []
    monkeypatch.setattr(CheckpointManager, "_open", lambda _, arguments: found.append(arguments))
    return found


def test_the_code_adds_to_what_the_job_says(places: PodPaths, given: list[ManagerArguments]) -> None:
    for manager in (CheckpointManager, xc.CheckpointManager):
        manager.from_env(_places=places, save=save.AtSteps((250,)), keep=keep.BestN(2, "loss", "min"))
        arguments = given.pop()
        assert arguments.policy == save.AnyOf((save.EveryNSteps(1), save.AtSteps((250,))))
        assert arguments.keep == keep.AnyOf((keep.LastN(3), keep.BestN(2, "loss", "min")))
        manager.from_env(_places=places, save=np.int64(5), keep=7)
        arguments = given.pop()
        assert arguments.save == save.AnyOf((save.EveryNSteps(1), save.EveryNSteps(5)))
        assert arguments.keep == keep.AnyOf((keep.LastN(3), keep.LastN(7)))


@pytest.mark.parametrize(
    ("is_mounted", "named", "tier", "tier_bytes"),
    [
        (False, None, None, None),
        (True, None, "volume", 7),
        (False, "ssd", "ssd", 7),
        (True, "ssd", "ssd", 7),
    ],
)
def test_what_the_code_names_comes_before_what_the_template_mounts(
    places: PodPaths,
    given: list[ManagerArguments],
    monkeypatch: pytest.MonkeyPatch,
    is_mounted: bool,
    named: str | None,
    tier: str | None,
    tier_bytes: int | None,
) -> None:
    folder = places.local_tier_folder.parent
    # The image may have such a folder too.
    places.local_tier_folder.mkdir()
    mounts = "22 1 0:30 / / rw,relatime - overlay overlay rw\n"
    if is_mounted:
        # Of the same file system as what is above it, as on a node that unpacks its images to folders.
        mounts += f"23 22 0:30 /pods/tier {places.local_tier_folder} rw,relatime - overlay overlay rw\n"
    monkeypatch.setattr(env, "read_mountinfo", lambda: mounts)
    options = Options(local_tier=None if named is None else folder / named, local_tier_bytes=7)
    CheckpointManager.from_env(_places=places, options=options)
    expected = None if tier is None else TierPlace(folder=str(folder / tier), most_bytes=tier_bytes)
    assert given[0].tier == expected


class Unreadable(float):
    """A tensor that can't be read, like one on a device whose buffer is gone."""

    @override
    def __str__(self) -> str:
        raise RuntimeError("the buffer was donated")


class Elsewhere:
    @override
    def __str__(self) -> str:
        raise AssertionError("read in another thread than the training's")


def test_a_metric_that_cannot_be_read_is_told_as_such_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    metrics = {
        "lost": Unreadable(1.0),
        "lazy": Elsewhere(),
        "meta": torch.zeros((), device="meta"),
        "host": torch.tensor(0.5, requires_grad=True),
    }
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            progress.record_step(step, metrics)
            progress.send_latest()
    assert [state.step for state in told] == [1, 2]
    assert told[1].metrics == {"lost": "?", "lazy": "?", "meta": "?", "host": "0.5"}
    assert len(caplog.records) == 3


def test_of_metrics_the_numbers_are_stored() -> None:
    metrics = {"loss": "0.5", "phase": "warm-up", "rate": 0.25, "host": torch.tensor(2.5), "huge": 10**400}
    assert select_stored_metrics(metrics) == {"loss": "0.5", "rate": "0.25", "host": "2.5"}


@pytest.mark.parametrize("text", ["Once upon a time " * 4000, b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_no_text_of_the_training_keeps_reports_from_being_read(text: str) -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    progress.record_step(7, {f"{text}{i}": text for i in range(MAX_METRICS)})
    progress.set_error(f"no such file: {text}")
    state = decode(TrainerState, json.loads(json.dumps(encode(told[-1]))))
    report = Report(phase=state.phase, step=state.step, metrics=state.metrics, error=state.error).to_json()
    assert len(report) <= REPORT_LIMIT_BYTES
    assert Report.from_json(report).step == 7


def test_only_machines_of_google_cloud_have_a_metadata_server(tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    assert find_metadata_host({}, product) is None
    product.write_text("Standard PC (Q35 + ICH9, 2009)\n")
    assert find_metadata_host({}, product) is None
    product.write_text("Google Compute Engine\n")
    assert find_metadata_host({}, product) == "169.254.169.254"
    assert find_metadata_host({"GCE_METADATA_HOST": "localhost:8080"}, product) == "localhost:8080"
