"""Keep the tensors of an optimizer that a load has filled, where torch's load_state_dict() puts others in their place.

Who else has such a tensor, as a compiled step, would go on with the old one; and on XLA a copy gets a sharding of its
own, with which the next step is another program. Of the state, torch makes all but `step` of the parameter's dtype and
device: float32 weights beside bfloat16 parameters would lose bits, and a number that NAdam has on the CPU would
be one on the devices, which each later step reads back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["filled_tensors_kept", "has_torchs_load"]

_PLACING = ("capturable", "fused")
"""The settings that say on which device an optimizer of torch has its numbers."""


@contextmanager
def filled_tensors_kept(optimizer: object, loaded: Any) -> Iterator[None]:
    """Put the tensors that are in `loaded` back after a load_state_dict() of it, if the object is an optimizer.

    Nothing is put back where the user's code may load them otherwise.

    Args:
        optimizer: an object with state_dict() and load_state_dict().
        loaded: what its load_state_dict() is called with, with the tensors that its state_dict() gave.
    """
    if not isinstance(optimizer, Optimizer) or not has_torchs_load(optimizer):
        yield
        return
    given = {id(leaf) for leaf in tree_leaves(loaded) if isinstance(leaf, torch.Tensor)}
    settings = [dict(group) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    yield
    for before, group in zip(settings, optimizer.param_groups, strict=False):
        group.update({k: v for k, v in before.items() if id(v) in given})
        if any(before.get(name) != group.get(name) for name in _PLACING):
            continue
        for parameter in group["params"]:
            if parameter in state:
                optimizer.state[parameter] = _with_those_given(
                    state[parameter], optimizer.state[parameter], given
                )


def has_torchs_load(optimizer: Optimizer) -> bool:
    """Return True if load_state_dict() is torch's own, without hooks, and not one of the user's."""
    # Asked first: a wrapper may never have called Optimizer.__init__(), and has no hooks then.
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return False
    # Every other optimizer has these, and there is no public way to ask for them.
    return not (
        optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks  # noqa: SLF001
    )


def _with_those_given(before: Any, after: Any, given: set[int]) -> Any:
    """Return a parameter's state after the load, with those tensors of the one before it that were given."""
    old, old_spec = tree_flatten(before)
    new, new_spec = tree_flatten(after)
    if old_spec != new_spec:
        return after
    return tree_unflatten([a if id(a) in given else b for a, b in zip(old, new, strict=True)], new_spec)
