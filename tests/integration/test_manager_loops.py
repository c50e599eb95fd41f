"""Training loops around the manager: torch_xla's own, and those where nothing is to be done."""

from pathlib import Path

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.errors import RestoreError


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def open_manager(uri: str, interval: int) -> CheckpointManager:
    return CheckpointManager(uri, interval, chkpt_on_preemption=False)


def test_the_loop_of_torch_xla_saves_once_when_it_is_to_stop(uri: str) -> None:
    manager = CheckpointManager(uri, 100)
    state = {"w": torch.zeros(10)}
    saved = []
    for step in range(1, 9):
        if step == 4:
            manager.request_stop()
        if manager.save_async(step, state):
            saved.append(step)
        assert manager.reached_preemption(step) is (step >= 4)
    manager.join()
    assert saved == manager.all_steps() == [4]
    manager.close()


def test_a_step_with_nothing_due_touches_nothing(uri: str) -> None:
    with open_manager(uri, interval=10**9) as manager:
        for step in range(1, 101):
            manager.step(step, {"w": torch.zeros(10)}, {"loss": 0.25})
        assert manager.health().companion_pid is None
        assert not Path(uri.removeprefix("file://")).exists()


def test_what_a_save_in_flight_is_about_to_delete_is_not_restored(uri: str) -> None:
    """One commit is kept: once the next is there the first is gone, and that is no damage."""
    with CheckpointManager(uri, 1, max_to_keep=1, chkpt_on_preemption=False) as manager:
        for step in range(2, 7, 2):
            manager.save(step, {"w": torch.full((1000,), float(step))})
            manager.save_async(step + 1, {"w": torch.full((1000,), step + 1.0)})
            state = {"w": torch.zeros(1000)}
            with pytest.raises(RestoreError, match=rf"no commit of step {step}; its steps: {step + 1}$"):
                manager.restore(step, state)
            assert not state["w"].any()
            assert manager.verify(step + 1).step == step + 1


def test_a_notice_after_going_back_saves_the_step_all_the_same(uri: str) -> None:
    manager = CheckpointManager(uri, 1000)
    state = {"w": torch.zeros(10)}
    for step in (5, 100):
        manager.save(step, state, force=True)
    manager.restore(5, state)
    manager.request_stop()
    saved = [step for step in range(6, 12) if manager.save_async(step, state)]
    manager.join()
    assert saved == [6]
    manager.close()
