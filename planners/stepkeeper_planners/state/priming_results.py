"""Collect the state that an optimizer's copy made in its step, and check that any first step would have made it."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, NAdam, Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters.open_shardings import is_sharded_as
from stepkeeper_planners.errors import PrimeError
from stepkeeper_planners.state.priming_copies import Pair, is_of_torch, with_those_inside
from stepkeeper_planners.state.priming_guards import check_complete, check_dense

__all__ = ["MadeState", "check_copies", "check_made", "collect_made_state", "list_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeState:
    """The state that an optimizer of the training gets for one of its parameters."""

    optimizer: Optimizer
    owner: Any
    """The parameter, or another key of the optimizer's state."""

    entry: Any
    inferred: tuple[torch.Tensor, ...] = ()
    """Those of its tensors that the step gave no sharding, or none but the parameter's."""


def collect_made_state(
    pair: Pair, parameters: Mapping[int, torch.Tensor], left_open: Collection[int]
) -> list[MadeState]:
    """Return the state that the copy made, for the parameters of the real optimizer that have none.

    Tensors of a parameter's shape get the parameter's sharding, unless the step gave them one.

    Args:
        pair: the real optimizer and its copy.
        parameters: the parameters, by the ids of their stand-ins.
        left_open: the ids of the parameters, and of other tensors, that had no sharding before they were copied.
    """
    real, stand_in = pair
    found: list[MadeState] = []
    for key, made in stand_in.state.items():
        owner: Any = parameters.get(id(key), key)
        if not made or real.state.get(owner):
            continue
        entry = tree_map(lambda leaf: parameters.get(id(leaf), leaf), made)
        if isinstance(entry, dict):
            entry |= _compute_first_numbers(real, owner, entry)
        # What has a sharding by now gets it in an unprimed first step too. The optimizer marked it, got it from the
        # host, or ran a program that made it.
        tensors = list_tensors(entry)
        inferred = [tensor for tensor in tensors if not adapters.has_sharding(tensor)]
        if id(owner) not in left_open:
            # Its copy of the gradient, as SGD's momentum, lies as the parameter because the gradient was made so.
            inferred += [tensor for tensor in tensors if is_sharded_as(tensor, owner)]
            for tensor in inferred:
                if tensor.shape == getattr(owner, "shape", None):
                    adapters.copy_sharding(tensor, owner)
        found.append(MadeState(optimizer=real, owner=owner, entry=entry, inferred=tuple(inferred)))
    return found


def check_made(made: list[MadeState], pairs: list[Pair]) -> None:
    """Check that all trained parameters got state, or have some, and that none of it is for sparse gradients.

    Raises:
        PrimeError: a parameter has none, or its gradients are sparse.
    """
    check_dense([(each.optimizer, each.owner) for each in made])
    primed = [each.owner for each in made]
    primed += [owner for real, _ in pairs for owner, entry in real.state.items() if entry]
    for real, _ in pairs:
        # One that wraps others steps them, each for its own part of the parameters, and may have no state itself.
        if len(with_those_inside(real)) == 1:
            check_complete(real, primed)


def check_copies(made: list[MadeState]) -> None:
    """Check that a step with gradients would have started from the same state as this step with zeros.

    That is known of state that is constant, equal to the parameter, or a multiple of the identity matrix.

    Raises:
        PrimeError: a tensor is none of these.
    """
    checks: dict[torch.device, list[tuple[torch.Tensor, str]]] = defaultdict(list)
    for each in made:
        optimizer, owner = each.optimizer, each.owner
        if is_of_torch(optimizer) or not isinstance(owner, torch.Tensor):
            continue
        for path, tensor in tree_flatten_with_path(each.entry)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                where = f"{type(optimizer).__name__}'s state{keystr(path)} of a parameter of shape {tuple(owner.shape)}"
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


def list_tensors(entry: Any) -> list[torch.Tensor]:
    """Return the tensors of one parameter's state, or of all of an optimizer's attributes."""
    return [leaf for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor)]


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
