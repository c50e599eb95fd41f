"""Give an optimizer the state that a load fills, without a training step.

Optimizers make their state in their first step, and a load fills only existing state.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters.open_shardings import is_sharded_as, keep_shardings_open, note_inferred
from stepkeeper_planners.errors import PrimeError
from stepkeeper_planners.state.priming_copies import (
    Pair,
    copy_with_stand_ins,
    is_of_torch,
    take_step,
    with_those_inside,
)
from stepkeeper_planners.state.random_state import RandomState

__all__ = ["prime_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeState:
    """The state that an optimizer of the training gets for one of its parameters."""

    optimizer: Optimizer
    owner: Any
    """The parameter, or another key of the optimizer's state."""

    entry: Any
    inferred: tuple[torch.Tensor, ...] = ()
    """Those of its tensors that the step gave no sharding, or none but the parameter's."""


def prime_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Give an optimizer the state that its first step makes, without taking a step of the training.

    Every parameter that requires a gradient gets its state: tensors of the shapes, dtypes and devices that a step
    gives them, and step counts of 0. A copy of the optimizer takes that step, with copies of the parameters (zeros
    for torch's own optimizers, which keep none), gradients of zeros and no weight decay. So state that keeps a copy
    of the parameter, as master weights do, is that copy.

    Nothing else changes: not the parameters, their gradients and shardings, the hyperparameters, state that was
    there before, random numbers, its hooks or schedules. A wrapper that has the optimizer that it wraps as `.optimizer`
    is primed with it.

    On XLA, state that the optimizer's step marks or replicates lies as without priming. Other state of a parameter's
    shape has that parameter's sharding; where a parameter has none yet, XLA chooses both in the first step. Hooks that
    mark state do so in the first step, and replace the sharding from priming.

    Without a load, training continues as if this hadn't been called, with two exceptions:

    - On XLA an unprimed first step has the zeros of the new state compiled into it, and a primed one reads them, as
      all later steps do. XLA may round the two differently, so the first step's results may differ in the last bits.
    - SGD takes the first gradient for a later one: it is dampened, and a sparse one is added to a dense momentum.

    Args:
        optimizer: a torch.optim.Optimizer, or an object that has one as `.optimizer`.

    Returns:
        The same object.

    Ranks: all call it, as all take a step.

    Raises:
        PrimeError: it isn't an optimizer, it can't be copied, its step needs a closure or takes a found_inf, the step
            failed, or it made no state for a parameter, or state that is neither constant nor a copy of the parameter.
            Nothing was changed.
    """
    if not isinstance(optimizer, Optimizer):
        wrapped = getattr(optimizer, "optimizer", None)
        if wrapped is None:
            raise PrimeError(
                f"prime_optimizer: {type(optimizer).__name__} isn't a torch.optim.Optimizer, and has none as .optimizer"
            )
        prime_optimizer(wrapped)
        return optimizer
    random, numbers = RandomState(), RandomState().state_dict()
    try:
        made = _make_state(optimizer)
    finally:
        random.load_state_dict(numbers)
    for each in made:
        each.optimizer.state[each.owner] = each.entry
    return optimizer


def _make_state(optimizer: Optimizer) -> list[_MadeState]:
    """Return the state that a step of a copy makes. Raises PrimeError."""
    optimizers = with_those_inside(optimizer)
    present = [
        tensor
        for each in optimizers
        for values in (each.param_groups, *each.state.values(), vars(each))
        for tensor in _list_tensors(values)
    ]
    with torch.no_grad(), keep_shardings_open(present) as left_open:
        pairs, stand_ins = copy_with_stand_ins(optimizer, left_open)
        take_step(pairs[0][1])
        if not all(map(is_of_torch, optimizers)):
            # Work left pending on copies of the parameters would get into the training's next program.
            adapters.start_pending(tuple(stand_ins.values()))
        originals = {id(stand_in): parameter for parameter, stand_in in stand_ins.items()}
        made = [each for pair in pairs for each in _collect(pair, originals, left_open)]
        _check_complete(made, pairs)
        adapters.start_pending([tensor for each in made for tensor in _list_tensors(each.entry)])
        _check_values(made)
        adapters.clear_sharding(
            [tensor for each in made if id(each.owner) in left_open for tensor in each.inferred]
        )
        note_inferred(tensor for each in made for tensor in each.inferred)
    return made


def _collect(
    pair: Pair, parameters: Mapping[int, torch.Tensor], left_open: Collection[int]
) -> list[_MadeState]:
    """Return the state that the copy made, for the parameters of the real optimizer that have none.

    Tensors of a parameter's shape get the parameter's sharding, unless the step gave them one. `parameters`
    are by the ids of their stand-ins; `left_open` has the ids of tensors that had no sharding before.
    """
    real, stand_in = pair
    found: list[_MadeState] = []
    for key, made in stand_in.state.items():
        owner: Any = parameters.get(id(key), key)
        if not made or real.state.get(owner):
            continue
        # State that refers to a stand-in refers to the parameter.
        entry = tree_map(lambda leaf: parameters.get(id(leaf), leaf), made)
        if isinstance(entry, dict):
            _set_first_numbers(real, owner, entry)
        tensors = _list_tensors(entry)
        # A tensor that has a sharding by now gets it in an unprimed first step too. The optimizer marked it, or got it
        # from the host, or a program made it.
        inferred = [tensor for tensor in tensors if not adapters.has_sharding(tensor)]
        if id(owner) not in left_open:
            # A copy of the gradient, as SGD's momentum, lies as the parameter only because `_stand_in_for` made it so.
            inferred += [tensor for tensor in tensors if is_sharded_as(tensor, owner)]
            for tensor in inferred:
                if tensor.shape == getattr(owner, "shape", None):
                    adapters.copy_sharding(tensor, owner)
        found.append(_MadeState(optimizer=real, owner=owner, entry=entry, inferred=tuple(inferred)))
    return found


def _set_first_numbers(real: Optimizer, owner: Any, entry: dict[Any, Any]) -> None:
    """Set the entry's numbers that every step changes to their values before the first step."""
    first: dict[str, float] = {"step": 0, "mu_product": 1}
    if isinstance(real, ASGD):
        rate = next(group["lr"] for group in real.param_groups if any(owner is p for p in group["params"]))
        first["eta"] = float(rate)
    for name in entry.keys() & first.keys():
        value = entry[name]
        if isinstance(value, torch.Tensor):
            entry[name] = torch.full_like(value, first[name])
            adapters.copy_sharding(entry[name], value)
        elif isinstance(value, int | float):
            entry[name] = type(value)(first[name])


def _check_complete(made: list[_MadeState], pairs: list[Pair]) -> None:
    """Check that all trained parameters got state, have some, or are known to need none."""
    primed = {id(each.owner) for each in made}
    primed |= {id(owner) for real, _ in pairs for owner, entry in real.state.items() if entry}
    for real, _ in pairs:
        # SGD has state for its momentum only.
        groups = [each for each in real.param_groups if not isinstance(real, SGD) or each["momentum"]]
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        n_without = sum(id(parameter) not in primed for parameter in trained)
        # An optimizer that wraps others steps them, each with a part of the parameters, and may have no state itself.
        if n_without and len(with_those_inside(real)) == 1:
            raise PrimeError(
                f"prime_optimizer: {type(real).__name__}.step() made no state for {n_without} of {len(trained)} "
                "parameters with gradients of zeros. If it never makes any, don't prime it; else load into the state "
                "that a real step leaves"
            )


def _check_values(made: list[_MadeState]) -> None:
    """Check that a step with gradients would have started from the same state as this step with zeros.

    That is known of torch's own optimizers, and of state that is constant, equal to the parameter, or a
    multiple of the identity matrix. Raises PrimeError.
    """
    for each in made:
        if is_of_torch(each.optimizer) or not isinstance(each.owner, torch.Tensor):
            continue
        for path, tensor in tree_flatten_with_path(each.entry)[0]:
            if isinstance(tensor, torch.Tensor) and not _is_as_before_a_step(
                _local(tensor), _local(each.owner)
            ):
                raise PrimeError(
                    f"prime_optimizer: {type(each.optimizer).__name__}'s state{keystr(path)} of a parameter of shape "
                    f"{tuple(each.owner.shape)} is neither constant nor the parameter after a step with gradients of "
                    "zeros, so what a real step makes of it is unknown. Load into the state that a real step leaves"
                )


def _is_as_before_a_step(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True, unchecked, also for whole numbers, and if the sizes of tensor and parameter differ."""
    is_checked = tensor.is_floating_point() and not tensor.is_meta and tensor.numel() == parameter.numel()
    if not is_checked or not tensor.numel():
        return True
    flat = tensor.reshape(-1)
    values = parameter.reshape(-1).to(device=tensor.device, dtype=tensor.dtype)
    is_constant = (flat == flat[0]).all()
    is_parameter = ((flat == values) | (flat.isnan() & values.isnan())).all()
    # One read from the device at the end, not one for each comparison.
    fits = is_constant | is_parameter
    if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
        identity = torch.eye(len(tensor), dtype=tensor.dtype, device=tensor.device)
        fits = fits | (tensor == tensor[0, 0] * identity).all()
    return bool(fits)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and tensor.device.type != "xla":
        return tensor.to_local().detach()
    return tensor.detach()


def _list_tensors(entry: Any) -> list[torch.Tensor]:
    """Return the tensors of one parameter's state, or of all of an optimizer's attributes."""
    return [leaf for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor)]
