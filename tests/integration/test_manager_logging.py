"""Test what a manager's process logs: each record names its step, start and rank."""

import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from stepkeeper import CheckpointManager, loggers
from stepkeeper.contract import ExitCode
from stepkeeper.errors import CompanionError, SaveError
from stepkeeper_testing.trainer import environment_in


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """By this package, in a process that has no identity yet."""
    monkeypatch.setattr(loggers, "_identity", {"attempt": None, "rank": None})
    handler = Kept()
    package = logging.getLogger("stepkeeper")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.DEBUG)
    yield handler.records
    package.setLevel(level)
    package.removeHandler(handler)


def whose(record: logging.LogRecord) -> tuple[Any, Any, Any]:
    return record.__dict__["step"], record.__dict__["attempt"], record.__dict__["rank"]


@pytest.mark.smoke
def test_each_record_of_a_training_that_goes_wrong_says_whose_it_is(
    tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    environment = environment_in(tmp_path, steps=1, jobset_number=2, restart_attempt=1)
    # It can't be written.
    (tmp_path / "termination").mkdir()
    state: dict[str, Any] = {"w": torch.zeros(3)}

    def broken(_: object) -> None:
        raise ZeroDivisionError("of a hook")

    def training(manager: CheckpointManager) -> None:
        manager.restore_latest(state)
        manager.on_save(broken)
        manager.step(1, state, {"loss": object()})
        assert manager.wait(60)
        # A file where the next step's folder has to be.
        (tmp_path / "root" / "2").write_text("")
        manager.step(2, state)
        with pytest.raises(SaveError):
            manager.wait(60)
        pid = manager.health().companion_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        manager.step(3, state)
        try:
            manager.wait(60)
        except (SaveError, CompanionError):
            manager.step(4, state)
        manager.request_stop()
        assert manager.step(5, state).stop

    with (
        pytest.raises(SystemExit, match=str(ExitCode.SAVED.value)),
        CheckpointManager(tmp_path / "root", 1, environment=environment) as manager,
    ):
        training(manager)
    assert {whose(record)[1:] for record in logged} == {("2.1", 0)}
    told = {record.name.removeprefix("stepkeeper").removeprefix(".") for record in logged}
    modules = {
        "training.step_controller",
        "process_end.last_words",
        "companion.progress",
        "companion.supervisor",
    }
    assert {"", *modules} <= told
    about = {step: whose(record)[0] for record in logged if (step := named_step(record)) is not None}
    assert {1, 2, 5} <= about.keys()
    assert all(step == named for named, step in about.items())


def named_step(record: logging.LogRecord) -> int | None:
    found = re.search(r"\bstep (\d+)\b", record.getMessage())
    return None if found is None else int(found[1])
