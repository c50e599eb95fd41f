"""State that an optimizer, its user or a step hook has marked with a sharding keeps it when the rest is primed."""

from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from priming import (
    ADAMW,
    OWN,
    MasterWeights,
    OwnShardings,
    divide,
    prime_and_nothing_else,
    sharded_model,
    shardings_of,
    take_step,
)


def the_optimizers_own_shardings_are_kept(marks: dict[str, tuple[Any, ...] | None]) -> None:
    """Compare with unprimed training, for a parameter that nobody marked and for parameters marked otherwise."""
    trainings = []
    for _ in range(2):
        layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in marks)).to("xla")
        for layer, spec in zip(layers, marks.values(), strict=True):
            if spec is not None:
                xs.mark_sharding(layer.weight, xs.Mesh(np.arange(4), (2, 2)), spec)
        torch_xla.sync()
        trainings.append((layers, OwnShardings(layers.parameters())))
    plain, primed = trainings
    prime_and_nothing_else(primed)
    placed, stepped = shardings_of(primed), take_step(plain).shardings
    for index, mark in enumerate(marks):
        for name in OWN:
            assert "devices=[" in stepped[f"{index}.{name}"], (mark, name)
            assert placed[f"{index}.{name}"] == stepped[f"{index}.{name}"], (mark, name)
    kept = take_step(primed).shardings
    assert {name: kept[name] for name in kept if name.endswith(OWN)} == {
        name: stepped[name] for name in kept if name.endswith(OWN)
    }


def shardings_of_state_that_was_there_are_kept() -> None:
    """One parameter's state was divided, another one's came from the CPU, which leaves its sharding to XLA."""
    model = sharded_model((2, 2))
    optimizer = MasterWeights(model.parameters())
    weight, *_, bias = model.parameters()
    for parameter in (weight, bias):
        state = {name: torch.zeros(parameter.shape).to("xla") for name in ("master", "momentum")}
        optimizer.state[parameter] = state
    for tensor in optimizer.state[weight].values():
        divide(tensor)
    torch_xla.sync()
    known = shardings_of((model, optimizer))
    prime_and_nothing_else((model, optimizer))
    now = shardings_of((model, optimizer))
    assert {name: now[name] for name in known} == known
    assert {now[f"0.{name}"] for name in ("master", "momentum")} == {"{devices=[1,4]0,1,2,3}"}
    assert {now[f"5.{name}"] for name in ("master", "momentum")} == {""}
    assert {"1.master", "1.momentum"} <= now.keys() - known.keys(), "nothing was primed beside it"


def a_step_hook_divides_primed_state(mark: tuple[Any, ...] | None) -> None:
    """Priming runs no hooks: in the first step, the hook divides state that has its parameter's sharding or none."""
    model: Any = torch.nn.Linear(8, 8, bias=False).to("xla")
    if mark is not None:
        xs.mark_sharding(model.weight, xs.Mesh(np.arange(4), (2, 2)), mark)
    optimizer = ADAMW(model.parameters())
    divided: list[str] = []

    def hook(*_: Any) -> None:
        for name in () if divided else ("exp_avg", "exp_avg_sq"):
            divide(optimizer.state[model.weight][name])
            divided.append(name)

    optimizer.register_step_post_hook(hook)
    torch_xla.sync()
    prime_and_nothing_else((model, optimizer))
    assert not divided, "priming ran a hook"
    for _ in range(2):
        placed = take_step((model, optimizer)).shardings
        assert placed["0.exp_avg"] == placed["0.exp_avg_sq"] == "{devices=[1,4]0,1,2,3}", mark


if __name__ == "__main__":
    xr.use_spmd()
    the_optimizers_own_shardings_are_kept(
        {"unmarked": None, "replicated": (None, None), "rows": (0, None), "blocks": (0, 1)}
    )
    shardings_of_state_that_was_there_are_kept()
    for mark in (None, (0, None)):
        a_step_hook_divides_primed_state(mark)
