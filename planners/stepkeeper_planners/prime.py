"""Optimizer state that a load can fill, made without a step of the training.

Optimizers make their state in their first step, and a load fills only what is there.
"""

import copy
import inspect
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.optim import ASGD, NAdam, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from stepkeeper_planners import adapters
from stepkeeper_planners.errors import PrimeError

__all__ = ["prime_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer")
_Pair = tuple[Optimizer, Optimizer]


def prime_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """The optimizer has its state, of the shapes, dtypes, devices and shardings that a step gives it; it is returned.

    Nothing else is changed: not the parameters, their gradients, the hyperparameters, state that was there before,
    random numbers, hooks or schedules. The step is taken by a copy of the optimizer, with zeros for parameters and
    gradients. Then step counts are set to 0, as before a first step: training on without a load goes on as if nothing
    had been called, except under SGD with dampening, which leaves the first gradient undampened and now takes it for
    a later one.

    Every parameter that requires a gradient gets its state. A wrapper that has the optimizer that it wraps as
    `.optimizer` is primed with it.

    Ranks: all call it, as all take a step.

    Raises:
        PrimeError: it is no optimizer, its step needs a closure, or the step failed. Nothing was changed.
    """
    if not isinstance(optimizer, Optimizer):
        wrapped = getattr(optimizer, "optimizer", None)
        if wrapped is None:
            raise PrimeError(
                f"prime_optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer, and has none as .optimizer"
            )
        prime_optimizer(wrapped)
        return optimizer
    with _random_numbers_kept(), torch.no_grad():
        pairs, stand_ins = _copied_with_zeros(optimizer)
        _take_step(pairs[0][1])
    parameters = {id(stand_in): parameter for parameter, stand_in in stand_ins.items()}
    adapters.start([tensor for pair in pairs for tensor in _hand_over(pair, parameters)])
    return optimizer


def _copied_with_zeros(optimizer: Optimizer) -> tuple[list[_Pair], dict[torch.Tensor, torch.Tensor]]:
    """The optimizer and those inside it, each with a copy; and every parameter with the zeros that the copies have."""
    inside = _with_those_inside(optimizer)
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    for each in inside:
        for group in each.param_groups:
            for parameter in group["params"]:
                if parameter not in stand_ins:
                    stand_ins[parameter] = _zeros_for(parameter)
    pairs = [(each, object.__new__(type(each))) for each in inside]
    memo: dict[int, Any] = {id(parameter): stand_in for parameter, stand_in in stand_ins.items()}
    memo |= {id(real): stand_in for real, stand_in in pairs}
    for real, stand_in in pairs:
        for name, value in vars(real).items():
            if name == "state":
                vars(stand_in)[name] = _copied_state(value, memo)
            elif name.startswith("_optimizer_") and name.endswith("_hooks"):
                vars(stand_in)[name] = OrderedDict()
            elif name != "step":
                # A schedule puts a step of its own before the class's one, bound to the real optimizer.
                vars(stand_in)[name] = _copied(value, memo)
    return pairs, stand_ins


def _with_those_inside(optimizer: Optimizer) -> list[Optimizer]:
    found = [optimizer]
    for each in found:
        leaves = [leaf for value in vars(each).values() for leaf in tree_leaves(value)]
        found += [
            leaf for leaf in leaves if isinstance(leaf, Optimizer) and all(leaf is not f for f in found)
        ]
    return found


def _zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    stand_in = torch.nn.Parameter(adapters.zeros_placed_as(parameter), requires_grad=False)
    vars(stand_in).update(vars(parameter))
    if parameter.requires_grad:
        stand_in.grad = adapters.zeros_placed_as(parameter)
    return stand_in


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        # Process groups, locks and the like can't be copied in many ways, each with its own error; a step uses them.
        return value


def _copied_state(state: MutableMapping[Any, Any], memo: dict[int, Any]) -> Any:
    """A state by the stand-ins; the same object for the same state, which a wrapper may share with what it wraps."""
    if id(state) not in memo:
        entries = {memo.get(id(key), key): _copied(entry, memo) for key, entry in state.items()}
        memo[id(state)] = defaultdict(dict, entries)
    return memo[id(state)]


def _take_step(stand_in: Optimizer) -> None:
    """The copy has its state, by the class's own step without the profiling and hooks that torch wraps it in."""
    step = type(stand_in).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    name = type(stand_in).__name__
    needed = [p.name for p in list(inspect.signature(step).parameters.values())[1:] if p.default is p.empty]
    if set(needed) - {"args", "kwargs"}:
        raise PrimeError(
            f"prime_optimizer: {name}.step() needs {', '.join(needed)}: what state it makes depends on what that "
            "gives. Load into the state that a real step leaves"
        )
    try:
        step(stand_in)
    except Exception as error:
        # Whatever kind of error the optimizer has for what it doesn't take.
        raise PrimeError(f"prime_optimizer: {name}.step() failed with gradients of zeros: {error}") from error


def _hand_over(pair: _Pair, parameters: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """The real optimizer has the state that its copy made, where it had none; all tensors of that.

    Those of a parameter's shape have its sharding.
    """
    real, stand_in = pair
    tensors = []
    for key, made in stand_in.state.items():
        owner: Any = parameters.get(id(key), key)
        if not made or real.state.get(owner):
            continue
        entry = tree_map(lambda leaf: parameters.get(id(leaf), leaf), made)
        if isinstance(entry, dict):
            entry |= _before_a_step(real, owner, entry)
        for tensor in [leaf for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor)]:
            if tensor.shape == getattr(owner, "shape", None):
                adapters.place_as(tensor, owner)
            tensors.append(tensor)
        real.state[owner] = entry
    return tensors


def _before_a_step(real: Optimizer, owner: Any, entry: dict[Any, Any]) -> dict[Any, Any]:
    """Those of the entry's numbers that a step changes whatever the gradient is, as they are before the first one."""
    first: dict[str, float] = {"step": 0}
    if isinstance(real, NAdam):
        first["mu_product"] = 1
    if isinstance(real, ASGD):
        rate = next(group["lr"] for group in real.param_groups if any(owner is p for p in group["params"]))
        first |= {"mu": 1, "eta": float(rate)}
    numbers: dict[Any, Any] = {}
    for name in entry.keys() & first.keys():
        value = entry[name]
        if isinstance(value, torch.Tensor):
            numbers[name] = torch.full_like(value, first[name])
        elif isinstance(value, int | float):
            numbers[name] = type(value)(first[name])
    return numbers


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """The next random numbers afterwards are those that would have come without what was done."""
    python = random.getstate()
    # Another module's random numbers may be in use only if it was imported.
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    xla = sys.modules["torch_xla"].core.xla_model if "torch_xla" in sys.modules else None
    seed = xla.get_rng_state() if xla is not None else None
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # has no types in torch
    devices = range(torch.cuda.device_count()) if in_use else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                sys.modules["numpy"].random.set_state(numpy)
            if xla is not None:
                xla.set_rng_state(seed)
