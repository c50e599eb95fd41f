"""Restores that are refused, that fail, of a part, or of several ranks.

What doesn't fit changes nothing, in no rank. What fails later leaves a mixed state, which is never saved.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import stepkeeper.torch_xla as xc
from stepkeeper import CheckpointManager, PartlyRestoredError, PerRank, Whole, prime_optimizer
from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper.errors import RestoreError, StorageError, TornCheckpointError
from stepkeeper_planners.errors import LoadMismatchError, PerRankError
from stepkeeper_testing.left_behind import head_of
from stepkeeper_testing.trainer import open_manager

RESTORING = Path(__file__).parent / "manager_trainer" / "restoring.py"


@pytest.mark.smoke
def test_all_ranks_or_none(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(RESTORING, 2, tmp_path, "one_does_not_fit")


def test_all_ranks_go_back_when_one_reads_badly(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(RESTORING, 2, tmp_path, "one_reads_badly")


def test_what_is_saved_after_going_back_descends_from_what_was_restored(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(RESTORING, 2, tmp_path, "going_back")


def test_a_failure_in_one_rank_leaves_the_states_of_all_mixed_and_none_is_saved(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(RESTORING, 2, tmp_path, "one_object_refuses")


Optimizers = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Optimizers] = {
    "without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "with state": torch.optim.AdamW,
}


def save(root: Path, state: dict[str, Any]) -> None:
    with open_manager(root) as manager:
        manager.save(1, state).result()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(3))


def trained_partly(make: Optimizers) -> dict[str, Any]:
    model = Model()
    torch.autograd.backward((model.a + model.b).sum())
    optimizer = make([model.a])
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.smoke
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_with_another_number_of_parameters_is_refused_by_its_name(
    tmp_path: Path, make: Optimizers, strict: bool
) -> None:
    """In a box it is one value, whose parameters have no names."""
    saved = trained_partly(make)
    save(tmp_path, {"model": saved["model"], "optimizer": Whole(saved["optimizer"])})
    model = Model()
    optimizer = make(model.parameters())
    with open_manager(tmp_path) as manager, pytest.raises(LoadMismatchError) as error:
        manager.restore({"model": model, "optimizer": Whole(optimizer)}, strict=strict)
    assert error.value.mismatched.keys() == {"optimizer"}
    assert "exclude=('optimizer',)" in str(error.value)
    assert torch.equal(model.a, torch.zeros(3))


@pytest.mark.smoke
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_of_other_parameters_is_refused_by_their_names(
    tmp_path: Path, make: Optimizers, caplog: pytest.LogCaptureFixture
) -> None:
    saved = trained_partly(make)
    save(tmp_path, saved)
    model = Model()
    optimizer = prime_optimizer(make([model.b, model.a]))
    with open_manager(tmp_path) as manager:
        with pytest.raises(LoadMismatchError, match=r"optimizer\.state\.b\.step|no group with b") as error:
            manager.restore({"model": model, "optimizer": optimizer})
        assert error.value.loaded == "nothing was loaded"
        assert torch.equal(model.a, torch.zeros(3))
        manager.restore({"model": model, "optimizer": optimizer}, strict=False)
    assert "strict=False" in caplog.text
    for one, other in zip(
        tree_leaves(saved["optimizer"].state[saved["model"].a]),
        tree_leaves(optimizer.state[model.a]),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_rates_that_differ_are_refused_before_a_tensor_is_changed(tmp_path: Path) -> None:
    def rates(model: Model, *of: float) -> torch.optim.Optimizer:
        parameters = [model.a, model.b] if len(of) == 2 else [[model.a, model.b]]
        groups = [{"params": some, "lr": torch.tensor(lr)} for some, lr in zip(parameters, of, strict=True)]
        return prime_optimizer(torch.optim.AdamW(groups))

    model, other = Model(), Model()
    torch.nn.init.ones_(model.a)
    save(tmp_path, {"model": model, "optimizer": rates(model, 0.5, 0.25)})
    optimizer = rates(other, 0.0)
    with (
        open_manager(tmp_path) as manager,
        pytest.raises(LoadMismatchError, match="different values") as error,
    ):
        manager.restore({"model": other, "optimizer": optimizer})
    assert error.value.loaded == "nothing was loaded"
    assert torch.equal(other.a, torch.zeros(3))
    assert not optimizer.param_groups[0]["lr"]


def test_a_root_with_positions_is_restored_by_position(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (trained_partly(lambda parameters: torch.optim.AdamW(parameters, lr=0.5)) for _ in "ab")
    save(tmp_path, {"model": first["model"], "optimizer": first["optimizer"].state_dict()})
    second["optimizer"].param_groups[0]["lr"] = 0.0
    with open_manager(tmp_path) as manager:
        manager.restore(second)
    assert second["optimizer"].param_groups[0]["lr"] == 0.5
    assert sum("by position, not by name" in line for line in caplog.messages) == 1


def test_ranks_values_that_cannot_be_converted_change_nothing(tmp_path: Path) -> None:
    # As two ranks save them.
    save(tmp_path, {"w": torch.ones(4), "n@0/2": 1, "n@1/2": 2})

    def refuse(*_: object) -> object:
        raise PerRankError("n: not for one rank")

    state: dict[str, Any] = {"w": torch.zeros(4), "n": PerRank(0, refuse)}
    with open_manager(tmp_path) as manager, pytest.raises(PerRankError, match="not for one rank"):
        manager.restore(state)
    assert torch.equal(state["w"], torch.zeros(4))


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
    """Save steps 1 and 2."""
    with open_manager(root) as manager:
        for step in (1, 2):
            manager.save(step, numbered(step, n_elements=n_elements)).result()


def find_data(root: Path) -> Path:
    """Return the first file of step 2. If there are several, the values are in the last one."""
    return min(root.glob("2/*/*.distcp"))


def flip_last_byte(root: Path) -> None:
    data = bytearray(find_data(root).read_bytes())
    data[-1] ^= 1
    find_data(root).write_bytes(data)


def remove_data(root: Path) -> None:
    find_data(root).unlink()


def leave(_root: Path) -> None:
    """Change nothing."""


@pytest.mark.parametrize("step", [2, None], ids=["a step", "the latest"])
@pytest.mark.parametrize("error", [ValueError("not this"), torch.OutOfMemoryError("no room")])
def test_what_an_object_refuses_is_raised_with_its_name_and_condemns_nothing(
    tmp_path: Path, error: Exception, step: int | None
) -> None:
    save_numbered(tmp_path)
    said = rf"step 2 .*{error}, .*Picky.load_state_dict\(\) for 'part.picky'"
    with open_manager(tmp_path) as manager:
        with pytest.raises(PartlyRestoredError, match=said) as raised:
            manager.restore(numbered(0, Picky(error)), step)
        assert raised.value.__cause__ is error
        assert manager.steps() == [1, 2]
    with open_manager(tmp_path) as manager:
        assert manager.restore(numbered(0))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        pytest.param(flip_last_byte, None, "__0_0.distcp is not what was", id="one of the files is bad"),
        pytest.param(remove_data, None, "__0_0.distcp is missing", id="one of the files is missing"),
        pytest.param(leave, ValueError("not this"), "ValueError: not this", id="an object refuses"),
    ],
)
def test_nothing_is_saved_of_a_state_that_a_failed_restore_has_left_mixed(
    tmp_path: Path, spoil: Callable[[Path], None], error: Exception | None, said: str
) -> None:
    n_elements = BLOCK_BYTES // 8 + 2
    save_numbered(tmp_path, n_elements)
    spoil(tmp_path)
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


def test_a_restore_that_succeeds_makes_good_for_one_that_failed(tmp_path: Path) -> None:
    save_numbered(tmp_path)
    picky = Picky(ValueError("not this"))
    state = numbered(0, picky)
    with open_manager(tmp_path) as manager:
        with pytest.raises(PartlyRestoredError):
            manager.restore(state)
        picky.error = None
        assert manager.restore(state) is not None
        assert numbers_in(state) == [2] * 4
        outcome = manager.step(3, state)
        assert outcome.in_flight is not None
        outcome.in_flight.result()
    assert manager.steps() == [1, 2, 3]


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
    flip_last_byte(tmp_path)
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


def test_torch_xlas_manager_never_saves_a_mixed_state(tmp_path: Path) -> None:
    save_numbered(tmp_path)
    picky = Picky(ValueError("not this"))
    state = numbered(3, picky)
    manager = xc.CheckpointManager(tmp_path, 1, chkpt_on_preemption=False)
    with pytest.raises(PartlyRestoredError):
        manager.restore(2, state)
    for save_it in (manager.save, manager.save_async):
        with pytest.raises(PartlyRestoredError, match="parts of step 2 "):
            save_it(4, state, force=True)
    picky.error = None
    manager.restore(1, state)
    assert manager.save(4, state)
    manager.close()
    assert manager.all_steps() == [1, 4]


@pytest.fixture(name="manager")
def _manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    state = {"model": {"w": torch.arange(6.0), "b": torch.ones(2)}, "optim": {"lr": 0.5}, "n": 7}
    with open_manager(tmp_path / "root") as manager:
        manager.save(1, state).result()
        yield manager


def zeros() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(6), "b": torch.zeros(2)},
        "optim": {"lr": 0.0},
        "n": 0,
    }


def test_items_are_loaded_and_nothing_else(manager: CheckpointManager, tmp_path: Path) -> None:
    state = zeros()
    assert manager.restore(state, items=["model"], exclude=["model.b"]) is not None
    assert torch.equal(state["model"]["w"], torch.arange(6.0))
    assert (state["model"]["b"].sum(), state["optim"], state["n"]) == (0, {"lr": 0.0}, 0)
    assert not head_of(tmp_path).verified, "a part says nothing about the rest"
    assert manager.restore(state) is not None
    assert (state["model"]["b"].sum(), state["optim"], state["n"]) == (2, {"lr": 0.5}, 7)
    assert head_of(tmp_path).verified


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.0.json"])
def test_a_verification_reads_every_object_and_condemns_none(
    manager: CheckpointManager, tmp_path: Path, name: str
) -> None:
    found = manager.verify(1)
    folder = tmp_path / "root" / head_of(tmp_path).folder
    there = [path.stat().st_size for path in folder.iterdir()]
    assert (found.step, found.n_objects, found.size_bytes) == (1, len(there), sum(there))
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(TornCheckpointError, match=name.replace(".", r"\.")):
        manager.verify(1)
    assert manager.steps() == [1]
