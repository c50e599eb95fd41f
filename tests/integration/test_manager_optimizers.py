"""Restores of optimizers from roots that hold both names and positions, or an optimizer alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from stepkeeper import prime_optimizer
from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_testing.trainer import open_manager

LARGE = BLOCK_BYTES // 8 + 2


class Model(nn.Module):
    def __init__(self, n_elements: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(n)) for n in (n_elements, 3))


def primed(step: int, n_elements: int = LARGE) -> dict[str, Any]:
    """Make a state whose elements are all `step`."""
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
    damaged = min(tmp_path.glob("2/*/*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
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
