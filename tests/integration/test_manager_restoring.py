"""Restores that are refused, of a part, or of several ranks: what doesn't fit changes nothing, in no rank."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils._pytree import tree_leaves

from stepkeeper import CheckpointManager, PerRank, Whole, prime_optimizer
from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper.errors import TornCheckpointError
from stepkeeper_planners.errors import LoadMismatchError, PerRankError
from stepkeeper_testing.damage import flip
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


Optimizers = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Optimizers] = {
    "without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "with state": torch.optim.AdamW,
}


def save(root: Path, state: dict[str, Any]) -> None:
    with open_manager(root) as manager:
        manager.save(1, state).result()


class Model(nn.Module):
    def __init__(self, n_elements: int = 3) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(n)) for n in (n_elements, 3))


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
    flip(folder / name, (folder / name).stat().st_size // 2)
    with pytest.raises(TornCheckpointError, match=name.replace(".", r"\.")):
        manager.verify(1)
    assert manager.steps() == [1]


LARGE = BLOCK_BYTES // 8 + 2


def primed(step: int, n_elements: int = LARGE) -> dict[str, Any]:
    model = Model(n_elements)
    optimizer = prime_optimizer(AdamW([model.b, model.a], lr=float(step)))
    with torch.no_grad():
        for parameter in model.parameters():
            for tensor in (parameter, *optimizer.state[parameter].values()):
                tensor.fill_(step)
    return {"model": model, "optimizer": optimizer, "n": step}


@pytest.mark.parametrize("named", [1, 2], ids=["positions are torn", "names are torn"])
def test_a_torn_step_with_names_falls_back_to_positions_and_the_other_way_round(
    tmp_path: Path, named: int
) -> None:
    with open_manager(tmp_path) as manager:
        for step in (1, 2):
            state = primed(step)
            given = state if step == named else {**state, "optimizer": state["optimizer"].state_dict()}
            manager.save(step, given).result()
    flip(min(tmp_path.glob("2/*/*.distcp")))
    state = primed(0)
    with open_manager(tmp_path) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, state["n"]) == (1, 1)
    optimizer = state["optimizer"]
    assert optimizer.param_groups[0]["lr"] == 1
    for parameter in state["model"].parameters():
        assert all(bool((each == 1).all()) for each in (parameter, *optimizer.state[parameter].values()))


def test_an_optimizer_that_is_the_state_is_refused_before_it_is_changed(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        manager.save(1, primed(1, 3)["optimizer"]).result()
    model = Model(3)
    other: Any = prime_optimizer(AdamW([{"params": [model.a]}, {"params": [model.b]}]))
    same = primed(0, 3)["optimizer"]
    with open_manager(tmp_path) as manager:
        with pytest.raises(LoadMismatchError, match="group 0 has 2 parameters in") as error:
            manager.restore(other, strict=False)
        assert error.value.loaded == "nothing was loaded"
        assert not any(other.state[each]["exp_avg"].any() for each in model.parameters())
        manager.restore(same)
    assert same.param_groups[0]["lr"] == 1
