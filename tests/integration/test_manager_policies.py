"""Policies, hooks and metrics of a manager in this process, its companion in another."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, SaveReport
from stepkeeper.errors import SaveError
from stepkeeper.log import Log
from stepkeeper.policy import keep
from stepkeeper.policy.save import SavePolicy
from stepkeeper.storage import open_store


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def open_manager(uri: str, policy: SavePolicy | int = 10**6, **options: Any) -> CheckpointManager:
    return CheckpointManager(uri, policy, chkpt_on_preemption=False, **options)


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
