"""Give an optimizer the state that a load fills, without a training step.

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
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, NAdam, Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from stepkeeper_planners import adapters
from stepkeeper_planners.errors import PrimeError
from stepkeeper_planners.state.priming_guards import (
    check_complete,
    check_dense,
    check_unchanged,
    check_unreachable,
    global_hooks_off,
    shardings_left_open,
    versions,
)

__all__ = ["prime_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer")
_Pair = tuple[Optimizer, Optimizer]
_Made = tuple[Optimizer, Any, Any]
"""An optimizer, a parameter of it (or another key), and the state for that."""


def prime_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Give an optimizer the state that its first step makes, without taking a step of the training.

    Every parameter that requires a gradient gets its state: tensors of the shapes, dtypes and devices that a step
    gives them, and step counts of 0. A copy of the optimizer takes that step, with copies of the parameters (zeros
    for torch's own optimizers, which keep none), gradients of zeros and no weight decay. So state that keeps a copy
    of the parameter, as master weights do, is that copy.

    Nothing else changes: not the parameters, their gradients and shardings, the hyperparameters, state that was
    there before, random numbers, hooks or schedules. A wrapper that has the optimizer that it wraps as `.optimizer`
    is primed with it.

    On XLA, state that the optimizer's step marks with a sharding keeps it, as in ZeRO. Other state of a parameter's
    shape has that parameter's sharding. Where a parameter has none yet, its state has none either: XLA chooses both in
    the first step, as without priming. A parameter that is marked as replicated gets replicated state, which XLA may
    shard in an unprimed first step. Hooks that mark state do so in the first step, over what priming gave it.

    Without a load, training goes on as if this hadn't been called, with two exceptions:

    - On XLA an unprimed first step is a program of its own: the zeros of the new state are compiled into it. A primed
      one reads them, as all later steps do. With torch's own optimizers and a sharding on every parameter it is the
      very program of the later steps; without a sharding on every parameter, the second step is. XLA may round the
      two programs differently, so the first step's results may differ in the last bits from an unprimed optimizer's.
    - SGD with dampening doesn't dampen the first gradient, and now takes it for a later one.

    Args:
        optimizer: a torch.optim.Optimizer, or an object that has one as `.optimizer`.

    Returns:
        The same object.

    Ranks: all call it, as all take a step.

    Raises:
        PrimeError: it is no optimizer, its step needs a closure, the step failed, it made no state for a parameter,
            state that is neither constant nor a copy of the parameter, or state for sparse gradients, or it reaches
            the parameters past the copy. Nothing was changed.
    """
    if not isinstance(optimizer, Optimizer):
        wrapped = getattr(optimizer, "optimizer", None)
        if wrapped is None:
            raise PrimeError(
                f"prime_optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer, and has none as .optimizer"
            )
        prime_optimizer(wrapped)
        return optimizer
    optimizers = _with_those_inside(optimizer)
    there = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    there += [tensor for each in optimizers for entry in each.state.values() for tensor in _tensors(entry)]
    kept = shardings_left_open(there)
    with _keep_random_state(), global_hooks_off(), torch.no_grad(), kept as left_open:
        pairs, stand_ins = _copied_with_stand_ins(optimizer)
        for _, stand_in in pairs:
            check_unreachable(stand_in, [*stand_ins, *(real for real, _ in pairs)])
            _zero_weight_decay(vars(stand_in), *stand_in.param_groups)
        before = versions([*stand_ins])
        try:
            _take_step(pairs[0][1])
        finally:
            if not all(_is_of_torch(real) for real, _ in pairs):
                check_unchanged(stand_ins, before)
                # What is left pending on copies of the parameters would get into the training's next program.
                adapters.start_pending([*stand_ins.values()])
        originals = {id(stand_in): parameter for parameter, stand_in in stand_ins.items()}
        made = [each for pair in pairs for each in _collect_made_state(pair, originals)]
        _check_made(made, pairs)
        unmarked = [
            tensor for _, owner, entry in made if id(owner) in left_open for tensor in _tensors(entry)
        ]
        with shardings_left_open(unmarked):
            adapters.start_pending([tensor for _, _, entry in made for tensor in _tensors(entry)])
            _check_copies(made)
    for real, owner, entry in made:
        real.state[owner] = entry
    return optimizer


def _copied_with_stand_ins(optimizer: Optimizer) -> tuple[list[_Pair], dict[torch.Tensor, torch.Tensor]]:
    """Pair the optimizer and those inside it with copies; map every parameter to the stand-in that the copies have."""
    inside = _with_those_inside(optimizer)
    has_values = not all(_is_of_torch(each) for each in inside)
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    for each in inside:
        for group in each.param_groups:
            for parameter in group["params"]:
                if parameter not in stand_ins:
                    stand_ins[parameter] = _stand_in_for(parameter, has_values=has_values)
    pairs = [(each, object.__new__(type(each))) for each in inside]
    memo: dict[int, Any] = {id(parameter): stand_in for parameter, stand_in in stand_ins.items()}
    memo |= {id(real): stand_in for real, stand_in in pairs}
    for real, stand_in in pairs:
        for name, value in vars(real).items():
            if name == "state":
                vars(stand_in)[name] = _copy_state(value, memo)
            elif name.startswith("_optimizer_") and name.endswith("_hooks"):
                vars(stand_in)[name] = OrderedDict()
            elif name != "step":
                # A schedule puts a step of its own before the class's one, bound to the real optimizer.
                vars(stand_in)[name] = _copy_value(value, memo)
    return pairs, stand_ins


def _with_those_inside(optimizer: Optimizer) -> list[Optimizer]:
    found = [optimizer]
    for each in found:
        leaves = [leaf for value in vars(each).values() for leaf in tree_leaves(value)]
        found += [
            leaf for leaf in leaves if isinstance(leaf, Optimizer) and all(leaf is not f for f in found)
        ]
    return found


def _zero_weight_decay(*settings: MutableMapping[str, Any]) -> None:
    """Set weight decay to 0, which would bring parameters' values into gradients, or back into parameters.

    The learning rate is kept: gradients are zeros in any case, and some optimizers keep the rate in their state.
    """
    for each in settings:
        for name, value in each.items():
            is_number = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
            if "weight_decay" in name and is_number:
                each[name] = value * 0


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer is one of torch's own.

    Those keep nothing of the parameters' values that a step doesn't overwrite.
    """
    # Some have the module that they are defined in, others, as Adafactor, the package.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _stand_in_for(parameter: torch.Tensor, *, has_values: bool) -> torch.Tensor:
    values = parameter.detach().clone() if has_values else torch.zeros_like(parameter.detach())
    adapters.copy_sharding(values, parameter)
    stand_in = torch.nn.Parameter(values, requires_grad=False)
    vars(stand_in).update(vars(parameter))
    if parameter.requires_grad:
        stand_in.grad = adapters.zeros_sharded_as(parameter)
    return stand_in


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        # Process groups, locks and the like can't be copied in many ways, each with its own error; a step uses them.
        return value


def _copy_state(state: MutableMapping[Any, Any], memo: dict[int, Any]) -> Any:
    """Copy a state, keyed by stand-ins. A wrapper may share a state with what it wraps; their copies share one too."""
    if id(state) not in memo:
        entries = {memo.get(id(key), key): _copy_value(entry, memo) for key, entry in state.items()}
        memo[id(state)] = defaultdict(dict, entries)
    return memo[id(state)]


def _take_step(stand_in: Optimizer) -> None:
    """Take the copy's step, with the class's own function, without the profiling and hooks that torch wraps it in."""
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


def _collect_made_state(pair: _Pair, parameters: dict[int, torch.Tensor]) -> list[_Made]:
    """Return the state that the copy made, for the parameters of the real optimizer that have none.

    Tensors of a parameter's shape get the parameter's sharding, unless the optimizer gave them one.
    """
    real, stand_in = pair
    found: list[_Made] = []
    for key, made in stand_in.state.items():
        owner: Any = parameters.get(id(key), key)
        if not made or real.state.get(owner):
            continue
        entry = tree_map(lambda leaf: parameters.get(id(leaf), leaf), made)
        if isinstance(entry, dict):
            entry |= _compute_first_numbers(real, owner, entry)
        for tensor in _tensors(entry):
            if tensor.shape == getattr(owner, "shape", None) and not adapters.has_sharding(tensor):
                adapters.copy_sharding(tensor, owner)
        found.append((real, owner, entry))
    return found


def _check_made(made: list[_Made], pairs: list[_Pair]) -> None:
    check_dense([(real, owner) for real, owner, _ in made])
    primed = [owner for _, owner, _ in made]
    primed += [owner for real, _ in pairs for owner, entry in real.state.items() if entry]
    for real, _ in pairs:
        # One that wraps others steps them, each for its own part of the parameters, and may have no state itself.
        if len(_with_those_inside(real)) == 1:
            check_complete(real, primed)


def _tensors(entry: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor)]


def _check_copies(made: list[_Made]) -> None:
    """Check that a step with gradients would have started from the same state as this step with zeros.

    That is known of state that is constant, equal to the parameter, or a multiple of the identity matrix.

    Raises:
        PrimeError: a tensor is none of these.
    """
    checks: dict[torch.device, list[tuple[torch.Tensor, str]]] = defaultdict(list)
    for real, owner, entry in made:
        if _is_of_torch(real) or not isinstance(owner, torch.Tensor):
            continue
        for path, tensor in tree_flatten_with_path(entry)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                where = f"{type(real).__name__}'s state{keystr(path)} of a parameter of shape {tuple(owner.shape)}"
                flag = _is_as_before_a_step(_local(tensor), _local(owner))
                checks[flag.device].append((flag, where))
    for flags in checks.values():
        fine = torch.stack([flag for flag, _ in flags]).tolist()
        for (_, where), is_fine in zip(flags, fine, strict=True):
            if not is_fine:
                raise PrimeError(
                    f"prime_optimizer: {where} is neither constant nor the parameter after a step with gradients of "
                    "zeros, so what a real step makes of it can't be told. Load into the state that a real step leaves"
                )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and tensor.device.type != "xla":
        return tensor.to_local().detach()
    return tensor.detach()


def _is_as_before_a_step(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a flag on the tensor's device. It is set, unchecked, if the sizes of tensor and parameter differ."""
    if not tensor.numel() or tensor.numel() != parameter.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    flat = tensor.reshape(-1)
    values = parameter.reshape(-1).to(device=tensor.device, dtype=tensor.dtype)
    fine = (flat == flat[0]).all() | ((flat == values) | (flat.isnan() & values.isnan())).all()
    if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
        identity = torch.eye(len(tensor), dtype=tensor.dtype, device=tensor.device)
        fine = fine | (tensor == tensor[0, 0] * identity).all()
    return fine


def _compute_first_numbers(real: Optimizer, owner: Any, entry: dict[Any, Any]) -> dict[Any, Any]:
    """Return those numbers of the entry that every step changes, with their values before a first step."""
    first: dict[str, float] = {"step": 0}
    if isinstance(real, NAdam):
        first["mu_product"] = 1
    if isinstance(real, ASGD):
        rate = next(group["lr"] for group in real.param_groups if any(owner is p for p in group["params"]))
        first |= {"mu": 1, "eta": float(rate), "ax": 0}
    numbers: dict[Any, Any] = {}
    for name in entry.keys() & first.keys():
        value = entry[name]
        if isinstance(value, torch.Tensor):
            numbers[name] = torch.full_like(value, first[name])
            adapters.copy_sharding(numbers[name], value)
        elif isinstance(value, int | float):
            numbers[name] = type(value)(first[name])
    return numbers


@contextmanager
def _keep_random_state() -> Iterator[None]:
    """Restore the states of all random number generators afterwards."""
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
