"""A save whose start was cut off, by a signal handler's exception or for want of a thread, holds up no later one."""

import threading
from pathlib import Path
from typing import NoReturn

import pytest

from stepkeeper import CheckpointManager
from stepkeeper.companion.messages import Committed
from stepkeeper.errors import SaveError
from stepkeeper.save import pipeline
from stepkeeper_testing.saves import record_of

STATE = {"step": 1}
RECORD = record_of(1)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointManager:
    committed = Committed(record=RECORD, uri="file:///root/1/x")
    monkeypatch.setattr(pipeline, "persist_save", lambda *_: committed)
    monkeypatch.setattr("stepkeeper.coordination.root_check.RootProof.make", lambda _proof: None)
    monkeypatch.setattr(pipeline, "check_same_state", lambda *_, **__: None)
    return CheckpointManager(str(tmp_path), 1)


@pytest.mark.parametrize("cut_off_in", ["InFlight", "build_state", "SaveJob"])
def test_an_exception_between_any_two_steps(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, cut_off_in: str
) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, cut_off_in, interrupt)
        for step in range(1, 4):
            with pytest.raises(KeyboardInterrupt):
                manager.save_async(step, STATE)
    assert manager.save_async(4, STATE)
    assert manager.wait(60)
    manager.close()


@pytest.mark.parametrize("name", ["save", "save-transfer"])
def test_a_thread_that_can_not_be_started(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for step in range(1, 4):
            with pytest.raises(SaveError, match="no thread could be started"):
                manager.save_async(step, STATE)
    assert manager.save_async(4, STATE)
    assert manager.wait(60)
    manager.close()
