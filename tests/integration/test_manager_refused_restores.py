"""A restore that is refused leaves the state as it was, whatever shows that the checkpoint doesn't fit."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepkeeper import CheckpointManager, PerRank, prime_optimizer
from stepkeeper_planners.errors import LoadMismatchError, PerRankError

Optimizers = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, Optimizers] = {
    "without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "with state": torch.optim.AdamW,
}


def open_manager(root: Path) -> CheckpointManager:
    return CheckpointManager(root, 1, chkpt_on_preemption=False)


def save(root: Path, state: dict[str, Any]) -> None:
    with open_manager(root) as manager:
        manager.save(1, state)


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
    save(tmp_path, trained_partly(make))
    model = Model()
    optimizer = make(model.parameters())
    prime_optimizer(optimizer)
    with open_manager(tmp_path) as manager, pytest.raises(LoadMismatchError) as error:
        manager.restore_latest({"model": model, "optimizer": optimizer}, strict=strict)
    if not (strict and optimizer.state):
        # A strict restore misses the second parameter's moments before.
        assert error.value.mismatched.keys() == {"optimizer"}
        assert "exclude=('optimizer',)" in str(error.value)
    assert torch.equal(model.a, torch.zeros(3))


def test_ranks_values_that_cannot_be_converted_change_nothing(tmp_path: Path) -> None:
    # As two ranks save them.
    save(tmp_path, {"w": torch.ones(4), "n@0/2": 1, "n@1/2": 2})

    def refuse(*_: object) -> object:
        raise PerRankError("n: not for one rank")

    state: dict[str, Any] = {"w": torch.zeros(4), "n": PerRank(0, refuse)}
    with open_manager(tmp_path) as manager, pytest.raises(PerRankError, match="not for one rank"):
        manager.restore_latest(state)
    assert torch.equal(state["w"], torch.zeros(4))


class Picky:
    """Refuse what is loaded, for reasons of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError(f"not {state['n']}")


def test_what_an_object_refuses_is_raised_with_its_name(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(4), "part": {"picky": Picky()}})
    state = {"w": torch.zeros(4), "part": {"picky": Picky()}}
    with open_manager(tmp_path) as manager, pytest.raises(ValueError, match="not 1") as error:
        manager.restore_latest(state)
    assert "Picky.load_state_dict() for 'part.picky'" in error.value.__notes__[0]
