"""Training loops around a manager: what it saves, reports and counts, its hooks, and what other threads save."""

import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import stepkeeper.torch_xla as xc
from stepkeeper import SaveReport
from stepkeeper.contract import ExitCode
from stepkeeper.errors import SaveError
from stepkeeper.log import Log
from stepkeeper.policy import keep
from stepkeeper.save.persist import persist_save
from stepkeeper.storage import open_store
from stepkeeper_testing.trainer import open_manager


@pytest.mark.parametrize("way", ["close", "the end of the block"])
def test_a_save_after_a_stop_is_committed(uri: str, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def persist(*arguments: Any) -> Any:
        time.sleep(0.5)
        return persist_save(*arguments)

    monkeypatch.setattr("stepkeeper.save.pipeline.persist_save", persist)
    manager = open_manager(uri, 1000)
    manager.step(1, {"w": torch.zeros(3)})
    manager.request_stop()
    assert manager.step(2, {"w": torch.zeros(3)}).stop
    manager.save(3, {"w": torch.zeros(3)})
    with pytest.raises(SystemExit) as ended:
        manager.close() if way == "close" else manager.__exit__(None, None, None)
    assert ended.value.code == ExitCode.SAVED
    assert open_manager(uri).steps() == [2, 3]


def test_a_loop_that_only_saves_is_warned_once_that_it_does_not_stop(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(SystemExit), open_manager(uri) as manager:
        manager.save(1, {"w": torch.zeros(3)})
        manager.request_stop()
        for step in (2, 3, 4):
            manager.save(step, {"w": torch.zeros(3)})
    warnings = [each for each in caplog.messages if "call `step` after every step" in each]
    assert len(warnings) == 1
    assert "step 3 comes after the stop at step 2" in warnings[0]
    assert open_manager(uri).steps() == [1, 2, 3, 4]


def test_a_hook_may_ask_the_manager_for_all_that_it_has(uri: str) -> None:
    seen: list[object] = []
    state = {"w": torch.arange(3.0)}
    with xc.CheckpointManager(uri, 1) as manager:

        def look(report: SaveReport) -> None:
            if report.step == 1:
                seen.append(manager.wait(20))
                manager.join()
                manager.verify(1)
                there = {"w": torch.zeros(3)}
                manager.restore(1, there)
                seen.extend((there["w"].tolist(), manager.all_steps(), manager.metadata(1).step))

        manager.on_save(look)
        assert manager.save(1, state)
    assert seen == [True, [0.0, 1.0, 2.0], [1], 1]


UNCLOSED = """
import sys, time, torch
from stepkeeper import CheckpointManager

def told(report):
    time.sleep(0.3)
    print(report.step, report.committed)

manager = CheckpointManager(sys.argv[1])
manager.on_save(told)
for step in (1, 2):
    manager.save(step, {"w": torch.zeros(3)})
"""


def test_hooks_of_the_last_saves_are_called_where_nobody_closes_the_manager(uri: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, uri], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1 True\n2 True\n"), done.stderr


N_THREADS, N_SAVES = 4, 10


@pytest.mark.parametrize("waits", [True, False])
def test_each_is_made_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, waits: bool) -> None:
    reports: list[SaveReport] = []

    def save(thread: int) -> None:
        for step in range(100 * thread, 100 * thread + N_SAVES):
            in_flight = manager.save(step, {"w": torch.full((1000,), float(step))})
            if waits:
                in_flight.result()

    steps = [100 * thread + number for thread in range(N_THREADS) for number in range(N_SAVES)]
    state = {"w": torch.zeros(1000)}
    with open_manager(tmp_path / "root") as manager:
        manager.on_save(reports.append)
        with ThreadPoolExecutor(N_THREADS) as threads:
            list(threads.map(save, range(N_THREADS), timeout=120))
        manager.wait()
        assert sorted(manager.steps()) == steps
        for step in (steps[0], steps[-1]):
            manager.restore(state, step)
            assert torch.equal(state["w"], torch.full((1000,), float(step)))
    assert sorted(report.step for report in reports) == steps
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


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
        in_flight = manager.step(1, state, {"loss": object()}).in_flight
        assert in_flight is not None
        assert in_flight.result(60) is in_flight.report
        record = Log(open_store(uri)).open().line[0]
        # A file where the next step's folder has to be.
        Path(uri.removeprefix("file://"), "2").write_text("")
        manager.step(2, state)
        manager._parts.saver.wait_until_idle()
        assert manager._parts.saver.cost is not None
        remove()
        with pytest.raises(SaveError, match="in the background failed"):
            manager.save(3, state).result()
        manager.save(3, state).result()
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
    assert "the metric 'loss', an object of type object, is reported as" in caplog.text


def test_the_best_stay_by_the_metrics_of_their_steps(uri: str) -> None:
    losses = {1: 5.0, 2: 1.0, 3: torch.tensor(4.0), 4: 0.5, 5: 9.0, 6: 8.0}
    policy = keep.AnyOf((keep.LastN(1), keep.BestN(2, "loss", "min")))
    with open_manager(uri, 10**6, keep=policy) as manager:
        for step, loss in losses.items():
            manager.save(step, {"w": torch.zeros(3)}, metrics={"loss": loss, "name": "run"}).result()
    assert open_manager(uri, 10**6).steps() == [2, 4, 6]
    line = Log(open_store(uri)).open().line
    assert [record.metrics for record in line] == [{"loss": "8.0"}, {"loss": "0.5"}, {"loss": "1.0"}]


def test_prometheus_counts_what_is_saved(uri: str) -> None:
    from prometheus_client import CollectorRegistry

    from stepkeeper.prometheus import export

    registry = CollectorRegistry()
    with open_manager(uri, 1) as manager:
        export(manager, registry)
        for step in (1, 2):
            manager.save(step, {"w": torch.zeros(3)}).result()
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
    early = open_manager(uri, 10**6)
    assert early.steps() == []
    assert not root.exists()
    with open_manager(uri, 10**6) as training:
        training.save(1, {"w": torch.ones(3)}).result()
        held = sorted(root.rglob("*"))
        late = open_manager(uri, 10**6)
        state = {"w": torch.zeros(3)}
        late.restore(state, 1)
        assert (early.steps(), late.steps()) == ([1], [1])
        for manager in (early, late):
            assert manager.health().companion_pid is None
            assert manager.health().claim is None
            manager.close()
        assert sorted(root.rglob("*")) == held
        training.save(2, state).result()
