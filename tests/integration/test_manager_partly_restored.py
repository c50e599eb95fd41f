"""Restores that fail half-way leave a mixed state, which is never saved; refused ones change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import PartlyRestoredError
from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper.errors import RestoreError, StorageError
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_testing.damage import flip
from stepkeeper_testing.trainer import open_manager

RESTORING = Path(__file__).parent / "manager_trainer" / "restoring.py"


def test_a_failure_in_one_rank_leaves_the_states_of_all_mixed_and_none_is_saved(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(RESTORING, 2, tmp_path, "one_object_refuses")


class Picky:
    """Has a number, which is never the same, and refuses what is loaded if there is a reason, half-way."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.n, self.m = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n, "m": self.m}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]
        if self.error is not None:
            raise self.error
        self.m = state["m"]


def numbered(step: int, picky: Picky | None = None, n_elements: int = 3) -> dict[str, Any]:
    """A state whose values are all `step`. If `n_elements` is large, it is saved in several files."""
    picky = picky or Picky()
    picky.n = picky.m = step
    tensors = {name: torch.full((n_elements,), float(step)) for name in ("first", "last")}
    return {**tensors, "part": {"picky": picky}}


def numbers_in(state: dict[str, Any]) -> list[float]:
    picky = state["part"]["picky"]
    return [*(float(state[name][-1]) for name in ("first", "last")), picky.n, picky.m]


def save_numbered(root: Path, n_elements: int = 3) -> None:
    with open_manager(root) as manager:
        for step in (1, 2):
            manager.save(step, numbered(step, n_elements=n_elements)).result()


def find_data(root: Path) -> Path:
    """Return the first file of step 2. If there are several, the values are in the last one."""
    return min(root.glob("2/*/*.distcp"))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        pytest.param(flip, None, "__0_0.distcp is not what was", id="one of the files is bad"),
        pytest.param(Path.unlink, None, "__0_0.distcp is missing", id="one of the files is missing"),
        pytest.param(
            lambda _: None,
            ValueError("not this"),
            r"ValueError: not this, .*Picky.load_state_dict\(\) for 'part.picky'",
            id="an object refuses",
        ),
    ],
)
def test_nothing_is_saved_of_a_state_that_a_failed_restore_has_left_mixed(
    tmp_path: Path, spoil: Callable[[Path], None], error: Exception | None, said: str
) -> None:
    n_elements = BLOCK_BYTES // 8 + 2
    save_numbered(tmp_path, n_elements)
    spoil(find_data(tmp_path))
    picky = Picky()
    state = numbered(3, picky, n_elements)
    with open_manager(tmp_path, save=1000) as manager:
        manager.step(3, state)
        picky.error = error
        with pytest.raises(PartlyRestoredError, match=rf"parts of step 2 .*{said}"):
            manager.restore(state, 2)
        picky.error = None
        for call in (manager.step, manager.save):
            with pytest.raises(PartlyRestoredError, match="parts of step 2 ") as raised:
                call(4, state)
            assert raised.value.__cause__ is not None
        for left, items, exclude in (("last", ["first", "part"], ()), ("part", None, ["part"])):
            with pytest.raises(PartlyRestoredError, match=rf"{left}.*: .*restore all of the state"):
                manager.restore(state, 1, items=items, exclude=exclude)
        with pytest.raises(RestoreError, match="no commit of step 7"):
            manager.restore(state, 7)
        with pytest.raises(PartlyRestoredError) as raised:
            manager.step(4, state)
        assert raised.value.__cause__ is not None, "it has the exit code"
    with open_manager(tmp_path) as manager:
        assert manager.steps() == [1, 2], "the end of the block has saved the last step"
        manager.restore(state, 1)
        assert numbers_in(state) == [1] * 4
        assert manager.save(4, state).result().step == 4


def test_what_a_step_does_not_have_keeps_a_state_mixed_also_without_strict(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        manager.save(1, {"first": torch.ones(3)}).result()
        manager.save(2, numbered(2)).result()
    picky = Picky(ValueError("not this"))
    state = numbered(3, picky)
    with open_manager(tmp_path) as manager:
        with pytest.raises(PartlyRestoredError):
            manager.restore(state, 2)
        picky.error = None
        for given in (state, {"first": state["first"]}):
            with pytest.raises(PartlyRestoredError, match=r"last, .*restore all of the state"):
                manager.restore(given, 1, strict=False)
        assert manager.restore(state, 2, strict=False) is not None
        manager.step(3, state)


def test_an_error_after_the_last_change_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the store is away")

    save_numbered(tmp_path)
    monkeypatch.setattr("stepkeeper.restore.latest.check_metadata", fail)
    with open_manager(tmp_path) as manager:
        with pytest.raises(PartlyRestoredError, match="the store is away"):
            manager.restore(numbered(0))
        with pytest.raises(PartlyRestoredError):
            manager.step(3, numbered(3))


def test_an_interrupted_restore_leaves_a_mixed_state(tmp_path: Path) -> None:
    save_numbered(tmp_path)
    state = numbered(3, Picky(KeyboardInterrupt()))
    with open_manager(tmp_path) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.restore(state, 2)
        with pytest.raises(PartlyRestoredError, match="KeyboardInterrupt"):
            manager.save(4, state)


def test_a_torn_commit_whose_parent_does_not_fit_leaves_a_mixed_state(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((2 + step,), float(step))}).result()
    flip(find_data(tmp_path))
    state = {"w": torch.zeros(4)}
    with open_manager(tmp_path) as manager:
        with pytest.raises(PartlyRestoredError, match=r"shape \(3,\) in the checkpoint") as raised:
            manager.restore(state)
        assert isinstance(raised.value.__cause__, LoadMismatchError)
        with pytest.raises(PartlyRestoredError):
            manager.save(3, state)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((numbered(0, n_elements=4), 2), LoadMismatchError),
        ((numbered(0, n_elements=4), None), LoadMismatchError),
        ((numbered(0), 7), RestoreError),
    ],
    ids=["another shape", "another shape than the latest", "no such step"],
)
def test_after_a_refused_restore_the_training_saves(
    tmp_path: Path, arguments: tuple[dict[str, Any], int | None], error: type[Exception]
) -> None:
    save_numbered(tmp_path)
    with open_manager(tmp_path, save=1000) as manager:
        state = numbered(3)
        manager.step(3, state)
        with pytest.raises(error) as raised:
            manager.restore(*arguments)
        assert not isinstance(raised.value, PartlyRestoredError)
        assert numbers_in(arguments[0]) == [0] * 4
    assert manager.steps() == [1, 2, 3], "the last step was finished, and nothing was changed"
