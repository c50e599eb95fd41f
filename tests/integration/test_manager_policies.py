"""Policies, hooks and metrics of a manager in this process, its companion in another."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, SaveReport
from stepkeeper.contract import Interval, Settings
from stepkeeper.errors import OtherJobsRootError, PeerLostError, SaveError
from stepkeeper.log import Log
from stepkeeper.policy import keep, save
from stepkeeper.policy.save import SavePolicy
from stepkeeper.storage import open_store
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.pod import pod_identity


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def new_state() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(7, 5)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "position": 0}


def train(state: dict[str, Any], step: int) -> None:
    model = state["model"]
    model(torch.full((2, 7), float(step))).sum().backward()
    state["optimizer"].step()
    state["position"] = step


def open_manager(uri: str, policy: SavePolicy | int = 10**6, **options: Any) -> CheckpointManager:
    return CheckpointManager(uri, policy, chkpt_on_preemption=False, **options)


def saved_steps(uri: str, policy: SavePolicy, n_steps: int, error: BaseException | None = None) -> list[int]:
    """Return the saved steps of a training of so many steps, which `error` ends behind them."""
    state = new_state()
    train(state, 0)
    manager = open_manager(uri, policy)
    try:
        with manager:
            manager.restore_latest(state)
            for step in range(1, n_steps + 1):
                train(state, step)
                manager.step(step, state)
            if error is not None:
                raise error
    except BaseException as raised:
        if raised is not error:
            raise
    return open_manager(uri).all_steps()


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), PeerLostError("rank 1 is lost"), ValueError("the loss is no number")],
    ids=["a chosen end", "our own", "the training's"],
)
def test_nothing_is_saved_for(uri: str, error: BaseException) -> None:
    policy = save.EveryNSteps(7)
    if isinstance(error, PeerLostError):
        with pytest.raises(SystemExit, match="78"):
            saved_steps(uri, policy, 3, error)
        assert open_manager(uri).all_steps() == []
    else:
        assert saved_steps(uri, policy, 3, error) == []


def test_a_training_that_ends_well_saves_its_last_step(uri: str) -> None:
    assert saved_steps(uri, save.EveryNSteps(7), 3) == [3]


def test_continuous_saves_begin_when_the_one_before_is_committed(uri: str) -> None:
    reports: list[SaveReport] = []
    state = {"w": torch.zeros(100)}
    with open_manager(uri, save.Continuous()) as manager:
        manager.on_save(reports.append)
        for step in range(1, 10**6):
            before = manager.in_flight
            begun = manager.step(step, state).in_flight
            assert begun is None or before is None or before.future.done()
            if len(reports) >= 3:
                break
            time.sleep(0.005)
    assert len(reports) >= 3


@pytest.mark.smoke
def test_reports_say_where_the_time_went(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepkeeper")
    reports: list[SaveReport] = []

    def broken(report: SaveReport) -> None:
        raise ZeroDivisionError(f"of a hook, at step {report.step}")

    state = {"w": torch.zeros(1000)}
    with open_manager(uri, 1) as manager:
        manager.on_save(broken)
        remove = manager.on_save(reports.append)
        in_flight = manager.step(1, state, {"loss": 0.5}).in_flight
        assert in_flight is not None
        record = in_flight.result(60).record
        # A file where the next step's folder has to be.
        Path(uri.removeprefix("file://"), "2").write_text("")
        manager.step(2, state)
        manager._parts.saver.wait_until_idle()
        assert manager._parts.saver.cost is not None
        remove()
        with pytest.raises(SaveError, match="in the background failed"):
            manager.save(3, state)
        manager.save(3, state)
    good, bad = reports
    assert good is in_flight.report
    assert (good.step, good.sequence, good.total_bytes) == (1, record.slot, record.size_bytes)
    assert good.committed
    assert 4000 <= good.size_bytes < record.size_bytes, "metadata belongs to no rank"
    parts = (good.stall_s, good.transfer_s, good.queue_s, good.persist_s, good.commit_s)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(good.duration_s, abs=1e-6)
    assert (bad.step, bad.sequence, bad.committed) == (2, None, False)
    assert bad.error is not None
    told = [each for each in caplog.records if each.name == "stepkeeper" and "committed" in each.getMessage()]
    assert [(each.__dict__["step"], each.__dict__["rank"]) for each in told] == [(1, 0), (3, 0)]
    assert "of a hook, at step 1" in caplog.text


def test_the_best_stay_by_the_metrics_of_their_steps(uri: str) -> None:
    losses = {1: 5.0, 2: 1.0, 3: torch.tensor(4.0), 4: 0.5, 5: 9.0, 6: 8.0}
    policy = keep.AnyOf((keep.LastN(1), keep.BestN(2, "loss", "min")))
    with open_manager(uri, keep=policy) as manager:
        for step, loss in losses.items():
            manager.save(step, {"w": torch.zeros(3)}, force=True, metrics={"loss": loss, "name": "run"})
    assert open_manager(uri).all_steps() == [2, 4, 6]
    line = Log(open_store(uri)).open().line
    assert [record.metrics for record in line] == [{"loss": "8.0"}, {"loss": "0.5"}, {"loss": "1.0"}]


def test_what_is_old_by_the_clock_of_the_store_goes(uri: str) -> None:
    with open_manager(uri, keep=keep.MaxAge(3600)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.zeros(3)}, force=True)
        for path in Path(uri.removeprefix("file://"), "1").rglob("*.json"):
            os.utime(path, (1.0, 1.0))
        manager.save(3, {"w": torch.zeros(3)}, force=True)
        # Times are asked for once: those of the first commit are known from before.
    with open_manager(uri, keep=keep.MaxAge(3600)) as manager:
        manager.save(4, {"w": torch.zeros(3)}, force=True)
    assert open_manager(uri).all_steps() == [2, 3, 4]


def test_prometheus_counts_what_is_saved(uri: str) -> None:
    from prometheus_client import CollectorRegistry

    from stepkeeper.prometheus import export

    registry = CollectorRegistry()
    with open_manager(uri, 1) as manager:
        export(manager, registry)
        for step in (1, 2):
            manager.save(step, {"w": torch.zeros(3)})
    value = registry.get_sample_value
    assert value("stepkeeper_saves_total", {"outcome": "committed"}) == 2
    assert value("stepkeeper_committed_step") == 2
    assert value("stepkeeper_save_stall_seconds_count") == 2
    saved_bytes = value("stepkeeper_saved_bytes_total")
    assert saved_bytes is not None
    assert saved_bytes > 24


def test_what_contradicts_itself_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="chkpt_on_preemption"):
        open_manager(uri, save.AnyOf((save.EveryNSteps(1), save.OnPreemption())))
    with pytest.raises(ValueError, match="max_to_keep and keep"):
        open_manager(uri, max_to_keep=1, keep=keep.LastN(1))


@pytest.mark.parametrize("name", [True, "default/lm"])
def test_another_jobs_root_is_taken_over_where_that_is_said(uri: str, name: bool | str) -> None:
    theirs = SmallRoot(uri)
    theirs.begin()
    theirs.save(10)
    state = {"w": torch.zeros(3)}
    for wrong in (False, "default/other"):
        with (
            pytest.raises(OtherJobsRootError, match="take_over='default/lm'"),
            open_manager(uri, take_over=wrong) as manager,
        ):
            save_once(manager, state)
    with open_manager(uri, take_over=name) as manager:
        save_once(manager, state)
    assert open_manager(uri).all_steps() == [10, 20]


def save_once(manager: CheckpointManager, state: dict[str, Any]) -> None:
    try:
        manager.save(20, state, force=True)
    except OtherJobsRootError:
        manager._parts.closing.close(1, None)
        raise


def test_how_often_the_job_was_restarted_is_told_to_the_policy(uri: str, tmp_path: Path) -> None:
    theirs = SmallRoot(uri)
    theirs.begin()
    theirs.begin(attempt=2)
    first = Path(uri.removeprefix("file://"), ".stepkeeper/log/00000000.json")
    os.utime(first, (first.stat().st_mtime - 7200, first.stat().st_mtime - 7200))
    environment = Environment(
        identity=pod_identity(restart_attempt=3),
        settings=Settings(uri=uri, interval=Interval(steps=1)),
        places=PodPaths(notice_file=tmp_path / "notice", termination_file=tmp_path / "termination"),
    )
    policy = save.AnyOf((save.EveryNSteps(7), save.Auto()))
    manager = open_manager(uri, policy, environment=environment)
    manager.save(7, {"w": torch.zeros(3)})
    seen, later = manager._parts.controller._read_conditions(), manager._parts.controller._read_conditions()
    assert seen.disruptions.count == 2
    assert 7200 <= seen.disruptions.over_s < later.disruptions.over_s < 7300
    assert seen.cost is not None
    assert not seen.saving
    manager.close()


@pytest.mark.smoke
def test_an_evaluators_manager_writes_nothing_and_starts_no_process(uri: str) -> None:
    root = Path(uri.removeprefix("file://"))
    early = open_manager(uri)
    assert early.all_steps() == []
    assert not root.exists()
    with open_manager(uri) as training:
        training.save(1, {"w": torch.ones(3)}, force=True)
        held = sorted(root.rglob("*"))
        late = open_manager(uri)
        state = {"w": torch.zeros(3)}
        late.restore(1, state)
        assert (early.all_steps(), late.all_steps()) == ([1], [1])
        for manager in (early, late):
            assert manager.health().companion_pid is None
            assert manager.health().claim is None
            manager.close()
        assert sorted(root.rglob("*")) == held
        training.save(2, state, force=True)
