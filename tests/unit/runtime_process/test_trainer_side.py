"""What stands around a trainer: its arguments, its progress, its stacks, and its forks."""

import json
import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

import stepkeeper
from stepkeeper import CheckpointManager
from stepkeeper.companion.progress import Progress, select_stored_metrics
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import SETTINGS_FILE_NAME, Interval, Report, Settings
from stepkeeper.contract.report import MAX_METRICS, REPORT_LIMIT_BYTES
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import BadUriError
from stepkeeper.policy import keep, save
from stepkeeper.policy.save import SavePolicy
from stepkeeper.training import environment as env
from stepkeeper.training.cloud.metadata_server import find_metadata_host
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_environ, pod_identity


def test_paths_and_numbers_may_be_of_any_library(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "root", np.int64(3), np.int32(2), np.int64(1), np.int64(1))
    assert manager.base_path == f"{tmp_path}/root/"
    assert [manager.should_save(step) for step in range(4)] == [True, False, False, True]
    for number in (manager.save_interval, manager.max_to_keep):
        assert type(number) is int
    manager.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((2.5,), TypeError),
        (("10",), TypeError),
        ((0,), ValueError),
        ((10, -1), ValueError),
        ((10, 0, 0.5), TypeError),
    ],
)
def test_what_is_no_number_of_steps_is_refused_at_once(
    tmp_path: Path, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        CheckpointManager(str(tmp_path), *arguments)


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        (Path("gs://bucket/run"), "gs://bucket/run"),
        ("gs:/bucket/run", "gs://bucket/run"),
    ],
)
def test_a_uri_that_lost_a_slash_is_no_folder(path: str | Path, whole: str) -> None:
    with pytest.raises(BadUriError, match=f"pass '{whole}', a str"):
        CheckpointManager(path, 10)
    with pytest.raises(BadUriError, match=f"pass '{whole}', a str"):
        stepkeeper.follow(str(path))


def test_a_root_in_the_memory_of_this_process_is_refused() -> None:
    with pytest.raises(
        BadUriError, match=r"'memory://run' is in the memory of one process.* temporary folder"
    ):
        CheckpointManager("memory://run", 10)


def test_a_home_folder_is_written_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("~/root", 10, local_tier="~/disk") as manager:
        assert manager.base_path == f"{tmp_path}/root/"
        manager.save(1, {"w": torch.ones(2)}, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "root"]


@pytest.mark.parametrize("tier", ["gs://bucket/tier", "file:///disk", Path("gs://bucket/tier")])
def test_a_local_tier_is_a_folder(tmp_path: Path, tier: str | Path) -> None:
    with pytest.raises(BadUriError, match=r"on this host's own disk|pathlib removes a slash"):
        CheckpointManager(str(tmp_path), 10, local_tier=tier)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodPaths:
    for name, value in pod_environ(pod_identity()).items():
        monkeypatch.setenv(name, value)
    settings = Settings(uri="gs://bucket/run", interval=Interval(steps=1))
    (tmp_path / SETTINGS_FILE_NAME).write_bytes(settings.to_json())
    return PodPaths(settings_folder=tmp_path, local_tier_folder=tmp_path / "volume")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments that a manager is constructed with, without constructing it."""
    found: dict[str, Any] = {}

    def note(_: CheckpointManager, __: str, policy: SavePolicy, **given: object) -> None:
        found.update(given, policy=policy)

    monkeypatch.setattr(CheckpointManager, "__init__", note)
    return found


def test_the_code_adds_to_what_the_job_says(places: PodPaths, options: dict[str, Any]) -> None:
    CheckpointManager.from_env(
        places=places, also_save=save.AtSteps((250,)), also_keep=keep.BestN(2, "loss", "min")
    )
    assert options["policy"] == save.AnyOf((save.EveryNSteps(1), save.AtSteps((250,))))
    assert options["keep"] == keep.AnyOf((keep.LastN(3), keep.BestN(2, "loss", "min")))


@pytest.mark.parametrize(
    ("is_mounted", "given", "tier", "tier_bytes"),
    [
        (False, None, None, None),
        (True, None, "volume", 7),
        (False, "ssd", "ssd", 7),
        (True, "ssd", "ssd", 7),
    ],
)
def test_what_the_code_names_comes_before_what_the_template_mounts(
    places: PodPaths,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    is_mounted: bool,
    given: str | None,
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
    CheckpointManager.from_env(
        places=places, local_tier=None if given is None else folder / given, local_tier_bytes=7
    )
    assert options["local_tier"] == (None if tier is None else folder / tier)
    assert options["local_tier_bytes"] == tier_bytes


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
        "exact": Decimal("0.1"),
        "word": "warm-up",
    }
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            progress.record_step(step, metrics)
            progress.send_latest_step()
    assert [state.step for state in told] == [1, 2]
    assert told[1].metrics == {
        "lost": "?",
        "lazy": "?",
        "meta": "?",
        "host": "0.5",
        "exact": "0.1",
        "word": "warm-up",
    }
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
