"""Copy an optimizer, with a stand-in for each parameter that it steps, and take a step of the copy."""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection, MutableMapping
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from stepkeeper_planners import adapters
from stepkeeper_planners.errors import PrimeError

__all__ = ["Pair", "copy_with_stand_ins", "is_of_torch", "take_step", "with_those_inside"]

Pair = tuple[Optimizer, Optimizer]
"""An optimizer of the training, and its copy."""


def with_those_inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer, and those that it holds in its attributes, at any depth."""
    found = [optimizer]
    for each in found:
        leaves = [leaf for value in vars(each).values() for leaf in tree_leaves(value)]
        found += [
            leaf for leaf in leaves if isinstance(leaf, Optimizer) and all(leaf is not f for f in found)
        ]
    return found


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether it is one of torch's own, whose state keeps no value of a parameter beyond a step."""
    # Some name the module that they are defined in, others, as Adafactor, the package torch.optim.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def copy_with_stand_ins(
    optimizer: Optimizer, left_open: Collection[int]
) -> tuple[list[Pair], dict[torch.Tensor, torch.Tensor]]:
    """Pair the optimizer and those inside it with copies; map every parameter to the stand-in that the copies have.

    The tensors whose ids are in `left_open` have no sharding, and their stand-ins get none. Raises PrimeError.
    """
    inside = with_those_inside(optimizer)
    has_values = not all(map(is_of_torch, inside))
    stand_ins: dict[torch.Tensor, torch.Tensor] = {
        parameter: _stand_in_for(parameter, has_values=has_values, is_left_open=id(parameter) in left_open)
        for parameter in dict.fromkeys(
            p for each in inside for group in each.param_groups for p in group["params"]
        )
    }
    pairs = [(each, object.__new__(type(each))) for each in inside]
    memo: dict[int, Any] = {id(real): stand_in for real, stand_in in [*stand_ins.items(), *pairs]}
    for real, stand_in in pairs:
        for name, value in vars(real).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                vars(stand_in)[name] = OrderedDict()
            elif name != "step":
                # A schedule puts a step of its own before the class's one, bound to the real optimizer.
                vars(stand_in)[name] = _copy_attribute(value, memo, f"{type(real).__name__}.{name}")
    for _, stand_in in pairs:
        _zero_weight_decay(vars(stand_in), *stand_in.param_groups)
    return pairs, stand_ins


def take_step(stand_in: Optimizer) -> None:
    """Take the copy's step, with the class's own function, without the profiling and hooks that torch wraps it in."""
    step = type(stand_in).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    name = type(stand_in).__name__
    if "found_inf" in inspect.signature(step).parameters:
        raise PrimeError(
            f"prime_optimizer: {name}.step() makes other state with a found_inf than without one, and which it gets "
            "isn't known. Take a step as the training does and load into the state that it leaves; without gradient "
            "scaling, torch.optim has the same optimizer"
        )
    try:
        step(stand_in)
    except Exception as error:
        # An optimizer may raise any kind of error for unsupported gradients.
        raise PrimeError(
            f"prime_optimizer: {name}.step() failed with gradients of zeros, so load into the state that a real step "
            f"leaves: {error}"
        ) from error


def _stand_in_for(parameter: torch.Tensor, *, has_values: bool, is_left_open: bool) -> torch.Tensor:
    """Make a stand-in with the parameter's attributes, and its values or zeros; its gradient is zeros."""
    values = parameter.detach().clone() if has_values else torch.zeros_like(parameter.detach())
    if is_left_open:
        # Reading the parameter has given it and `values` a sharding. The gradient must not get that.
        adapters.clear_sharding([parameter, values])
    adapters.copy_sharding(values, parameter)
    stand_in = torch.nn.Parameter(values, requires_grad=False)
    vars(stand_in).update(vars(parameter))
    if parameter.requires_grad:
        stand_in.grad = torch.zeros_like(parameter.detach())
        adapters.copy_sharding(stand_in.grad, parameter)
    return stand_in


def _copy_attribute(value: Any, memo: dict[int, Any], name: str) -> Any:
    """Copy an attribute of an optimizer.

    Raises PrimeError if the copy's step could reach the training's own objects through it.
    """
    try:
        cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
        if not any(id(leaf) in memo for cell in cells for leaf in tree_leaves(cell.cell_contents)):
            return copy.deepcopy(value, memo)
    except Exception:
        # Each kind has an error of its own. A step uses locks and process groups, which hold no Python objects.
        if not hasattr(value, "__dict__") and not isinstance(value, dict | list | tuple | set):
            return value
    raise PrimeError(
        f"prime_optimizer: {name} can't be copied, and a step of a copy might change the parameters through it. Load "
        "into the state that a real step leaves"
    )


def _zero_weight_decay(*settings: MutableMapping[str, Any]) -> None:
    """Set weight decay to 0, which would bring parameters' values into gradients, or back into parameters.

    The learning rate is kept: gradients are zeros in any case, and some optimizers keep the rate in their state.
    """
    for each in settings:
        for name, value in each.items():
            is_number = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
            if "weight_decay" in name and is_number:
                each[name] = value * 0
