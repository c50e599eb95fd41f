"""A process that restores nothing or a part, and saves: nothing that was there is deleted, and one warning says so."""

from typing import Any

import pytest
import torch

import stepkeeper.torch_xla as xc
from stepkeeper import CheckpointManager
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.storage import open_store
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_testing.trainer import open_manager


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, {"w": torch.full((4,), float(step))}).result()


def opened(uri: str) -> LogState:
    return Log(open_store(uri)).open()


def steps_of(records: tuple[CommitRecord, ...]) -> list[int]:
    return sorted(record.step for record in records)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "begins a branch of its own" in text]


def assert_whole(uri: str, *steps: int) -> None:
    """Check that the data of these steps is there, and what was saved."""
    by_step = {record.step: record for record in opened(uri).live}
    with open_manager(uri) as manager:
        for step in steps:
            Log(open_store(uri)).begin(base=by_step[step].slot, take_over=True)
            state = {"w": torch.zeros(4)}
            manager.restore(state, step)
            assert state["w"].tolist() == [float(step)] * 4


def test_steps_from_the_beginning_delete_none_of_those_that_were_there(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_manager(uri, keep=2) as manager:
        save(manager, 99_000, 99_500, 100_000)
    old = steps_of(opened(uri).live)
    with open_manager(uri, keep=2) as manager:
        save(manager, 1, 2, 3)
    state = opened(uri)
    assert open_manager(uri).steps() == steps_of(state.line) == [2, 3]
    assert steps_of(state.live) == [2, 3, *old]
    (told,) = warned(caplog)
    assert "step 1 begins a branch of its own" in told
    assert "this root is at step 100000 already" in told
    assert "call restore(state), with this same state and all of it, before the first save" in told
    assert_whole(uri, *old)


@pytest.mark.parametrize("way", ["latest", "by its step"])
def test_what_was_restored_is_gone_on_from_with_any_step(
    uri: str, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """A fine-tuning counts from the beginning: it has said what it goes on from."""
    with open_manager(uri) as manager:
        save(manager, 10, 20)
    with open_manager(uri) as manager:
        state = {"w": torch.zeros(4)}
        if way == "by its step":
            manager.restore(state, 20)
        else:
            manager.restore(state)
        save(manager, 1)
        assert manager.steps() == [1, 10, 20]
    assert not warned(caplog)


@pytest.mark.parametrize("rules", [{"items": ["w"]}, {"exclude": ["moments"]}, {"strict": False}])
@pytest.mark.parametrize("by", ["latest", "step"])
def test_who_has_restored_a_part_goes_on_with_greater_steps_only(
    uri: str, caplog: pytest.LogCaptureFixture, rules: dict[str, Any], by: str
) -> None:
    """The rest of what was saved is nowhere else than in the commits that were there."""

    def state() -> dict[str, Any]:
        return {"w": torch.zeros(4), "moments": torch.zeros(4)}

    with open_manager(uri, keep=2) as manager:
        for step in (99_000, 100_000):
            manager.save(step, state()).result()
    with open_manager(uri, keep=2) as manager:
        part = {"w": torch.zeros(4)} if "strict" in rules else state()
        if by == "latest":
            manager.restore(part, **rules)
        else:
            manager.restore(part, 100_000, **rules)
        manager.save(100_001, state()).result()
        assert not warned(caplog)
        for step in (1, 2, 3):
            manager.save(step, state()).result()
    assert open_manager(uri).steps() == [2, 3]
    assert len(warned(caplog)) == 1
    assert steps_of(opened(uri).live) == [2, 3, 100_000, 100_001]


def test_torch_xlas_restore_leaves_out_what_only_the_commit_has(uri: str) -> None:
    def state(step: float, *more: str) -> dict[str, Any]:
        return {"model": {name: torch.full((2,), step) for name in ("w", *more)}}

    manager = xc.CheckpointManager(uri, 1, chkpt_on_preemption=False)
    for step in (5, 100):
        manager.save(step, state(step, "old", "[w]") | {"moments": torch.zeros(4)})
    part = state(0)
    manager.restore(5, part)
    assert part["model"]["w"].tolist() == [5.0] * 2
    for wrong in (state(0, "new"), {"model": {"w": torch.zeros(3)}}):
        before = str(wrong)
        with pytest.raises(LoadMismatchError):
            manager.restore(5, wrong)
        assert str(wrong) == before
    missing: Any = None
    with pytest.raises(TypeError, match="step is a whole number"):
        manager.restore(missing, part)
    manager.save(101, state(101, "old", "[w]") | {"moments": torch.zeros(4)})
    manager.close()
    assert open_manager(uri).steps() == [5, 100, 101], "a part of a commit is none to go on from"


@pytest.mark.parametrize("entries", [("w",), ("w", "moments", "more")])
def test_who_saves_something_else_than_was_restored_deletes_nothing(
    uri: str, caplog: pytest.LogCaptureFixture, entries: tuple[str, ...]
) -> None:
    with open_manager(uri, keep=1) as manager:
        state = {"w": torch.zeros(4), "moments": [torch.zeros(4)]}
        manager.save(100_000, state).result()
        manager.restore(state)
    with open_manager(uri, keep=1) as manager:
        manager.restore(state)
        for step in (1, 2):
            manager.save(step, {name: torch.zeros(4) for name in entries}).result()
    assert len(warned(caplog)) == 1
    assert steps_of(opened(uri).live) == [2, 100_000]
