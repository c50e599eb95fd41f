"""Primed state on sharded parameters: placed as a real step places it, and nothing else changed."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch_xla.amp import syncfree
from trainings import ADAMW, KINDS, OWN, OwnShardings, Spec, Step, Training, divide, make_training
from typing_extensions import override

from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.errors import PrimeError

_C: Any = torch_xla._XLAC
DIVIDED = "{devices=[1,4]0,1,2,3}"


class MasterWeights(Optimizer):
    """An optimizer that isn't torch's own: its state is made from the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"], state["momentum"] = p.detach().clone(), torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad)
                state["master"].sub_(group["lr"] * state["momentum"])
                p.copy_(state["master"])


def described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def prime_and_nothing_else(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    groups, values, before = optimizer.state_dict()["param_groups"], training.values(), training.shardings()
    seed, pending = xm.get_rng_state(), torch.ones(2, device="xla") + 1
    prime_optimizer(optimizer)
    assert _C._check_tensor_need_materialization([pending]) == [True], "work of the training was started"
    assert xm.get_rng_state() == seed
    assert_equal(training.values(), values)
    assert before.items() <= training.shardings().items()
    assert all(parameter.grad is None for parameter in model.parameters())
    for one, other in zip(
        tree_leaves(groups), tree_leaves(optimizer.state_dict()["param_groups"]), strict=True
    ):
        assert one == other
    assert not any(_C._check_tensor_need_materialization(training.on_devices())), (
        "what was made is still to come"
    )


def runs_the_programs_of_unprimed_training(kind: str, mesh_shape: tuple[int, ...]) -> None:
    """Compare programs with those of unprimed training, whose first step no primed one equals bit by bit.

    That step has the state's zeros compiled into it, later ones and a primed one read them. The compiler contracts
    and fuses the two differently, and so rounds them differently on some processors.
    """
    plain = make_training(mesh_shape, "mixed", KINDS[kind])
    first, second = plain.step(), plain.step()
    xla_shards_what_is_not_marked(kind, mesh_shape, first, second)
    marked = make_training(mesh_shape, "mixed", KINDS[kind], like=plain)
    prime_and_nothing_else(marked)
    states = [tree_map(described, each.optimizer.state_dict()) for each in (marked, plain)]
    assert states[0] == states[1], kind
    assert marked.shardings() == second.shardings, kind
    values = marked.values()
    for name, tensor in plain.tensors().items():
        tensor.copy_(values[name])
    # By a sync the values go where the tensors' shardings say; a program that used them before would replicate them.
    torch_xla.sync()
    later, ours = plain.step(), marked.step()
    assert (ours.key, ours.n_compiled, ours.shardings) == (later.key, 0, later.shardings), kind
    assert_equal(ours.values, later.values)
    # Adafactor computes a weight of exactly 1 from a count of 1, which torch_xla compiles in as a constant.
    assert later.key == second.key or kind == "adafactor", kind


def xla_shards_what_is_not_marked(kind: str, mesh_shape: tuple[int, ...], first: Step, second: Step) -> None:
    """Compare two steps after priming with the first two without it, where XLA shards one parameter and its state."""
    primed = make_training(mesh_shape, "mixed", KINDS[kind])
    prime_and_nothing_else(primed)
    ours = primed.step()
    assert tree_map(described, ours.values) == tree_map(described, first.values), kind
    assert ours.shardings == first.shardings, kind
    for name, value in first.values.items():
        torch.testing.assert_close(ours.values[name], value, msg=f"{kind} {name}: {{}}".format)
    ours = primed.step()
    assert (ours.key, ours.n_compiled, ours.shardings) == (second.key, 0, second.shardings), kind


def state_stays_replicated_with_a_parameter_that_is_marked_so() -> None:
    """Without priming XLA would shard this state. Where all is marked there is one program, also after a restart."""
    training = make_training((2, 2), "mixed", KINDS["adamw-capturable"], more_marks={"4.bias": (None,)})
    prime_and_nothing_else(training)
    placed = training.shardings()
    assert {placed[f"5.{name}"] for name in ("parameter", "exp_avg", "exp_avg_sq")} == {"{replicated}"}
    first, second = training.step(), training.step()
    assert first.shardings == second.shardings == placed
    assert (second.key, second.n_compiled) == (first.key, 0)


def parameters_that_are_copied_are_left_to_xla_too() -> None:
    training = make_training((2, 2), "mixed", MasterWeights)
    prime_and_nothing_else(training)
    placed, values = training.shardings(), training.values()
    assert {placed[f"5.{name}"] for name in ("parameter", "master", "momentum")} == {""}
    assert all(torch.equal(values[f"{i}.master"], values[f"{i}.parameter"]) for i in range(6))


def a_step_that_takes_what_a_scaler_found_is_not_primed() -> None:
    for kind in (syncfree.SGD, syncfree.Adam, syncfree.AdamW):
        optimizer = kind([torch.nn.Parameter(torch.ones(2, device="xla"))], lr=0.1)
        with pytest.raises(PrimeError, match="found_inf"):
            prime_optimizer(optimizer)
        assert not optimizer.state


def layers_of(*marks: Spec | None) -> torch.nn.Sequential:
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in marks)).to("xla")
    for weight, spec in zip(layers.parameters(), marks, strict=True):
        if spec is not None:
            xs.mark_sharding(weight, xs.Mesh(np.arange(4), (2, 2)), spec)
    return layers


def the_optimizers_own_shardings_are_kept(*marks: Spec | None) -> None:
    """Compare with unprimed training, for a parameter that nobody marked and for parameters marked otherwise."""
    models = [layers_of(*marks) for _ in range(2)]
    plain, primed = (Training(model, OwnShardings(model.parameters())) for model in models)
    prime_and_nothing_else(primed)
    own = [f"{index}.{name}" for index in range(len(marks)) for name in OWN]
    placed, stepped = primed.shardings(), plain.step().shardings
    assert all("devices=[" in stepped[name] for name in own)
    kept = primed.step().shardings
    assert [placed[name] for name in own] == [stepped[name] for name in own] == [kept[name] for name in own]


def shardings_of_state_that_was_there_are_kept() -> None:
    """One parameter's state was divided, another one's came from the CPU, which leaves its sharding to XLA."""
    training = make_training((2, 2), "mixed", MasterWeights)
    weight, *_, bias = training.model.parameters()
    for parameter in (weight, bias):
        for name in ("master", "momentum"):
            training.optimizer.state[parameter][name] = torch.zeros(parameter.shape).to("xla")
    for tensor in training.optimizer.state[weight].values():
        divide(tensor)
    torch_xla.sync()
    known = training.shardings()
    prime_and_nothing_else(training)
    now = training.shardings()
    assert {now[f"0.{name}"] for name in ("master", "momentum")} == {DIVIDED}
    assert {now[f"5.{name}"] for name in ("master", "momentum")} == {""}
    assert {"1.master", "1.momentum"} <= now.keys() - known.keys(), "nothing was primed beside it"


def a_step_hook_divides_primed_state(mark: Spec | None) -> None:
    """Priming runs no hooks: in the first step, the hook divides state that has its parameter's sharding or none."""
    model = layers_of(mark)
    training = Training(model, ADAMW(model.parameters()))
    divided: list[str] = []

    def hook(*_: Any) -> None:
        for name in () if divided else ("exp_avg", "exp_avg_sq"):
            divide(training.optimizer.state[next(model.parameters())][name])
            divided.append(name)

    training.optimizer.register_step_post_hook(hook)
    prime_and_nothing_else(training)
    assert not divided, "priming ran a hook"
    for _ in range(2):
        placed = training.step().shardings
        assert placed["0.exp_avg"] == placed["0.exp_avg_sq"] == DIVIDED, mark


def main(kinds: list[str]) -> None:
    for index, kind in enumerate(KINDS):
        if kind in (kinds or KINDS):
            runs_the_programs_of_unprimed_training(kind, [(2, 2), (4, 1), (1, 4)][index % 3])
    if not kinds:
        state_stays_replicated_with_a_parameter_that_is_marked_so()
        parameters_that_are_copied_are_left_to_xla_too()
        a_step_that_takes_what_a_scaler_found_is_not_primed()
        the_optimizers_own_shardings_are_kept(None, (None, None), (0, None), (0, 1))
        shardings_of_state_that_was_there_are_kept()
        for mark in (None, (0, None)):
            a_step_hook_divides_primed_state(mark)


if __name__ == "__main__":
    xr.use_spmd()
    main(sys.argv[1:])
