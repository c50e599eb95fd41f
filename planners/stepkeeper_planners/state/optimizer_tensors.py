"""Keep the tensors of an optimizer that a load has filled, where torch's load_state_dict() would replace them.

Anything else that holds such a tensor, such as a compiled step, would keep using the old one. On XLA a copy gets its
own sharding, which makes the next step another program. torch converts all state but `step` to the parameter's dtype
and device: float32 weights beside bfloat16 parameters would lose bits, and a number that NAdam keeps on the CPU would
move to the devices, from where each later step reads it back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from stepkeeper_planners.state.scalars import has_plain_leaves_only

__all__ = ["has_torchs_load", "keep_filled_tensors"]

_PLACING = ("capturable", "fused")
"""The settings that determine on which device an optimizer of torch has its numbers."""


@contextmanager
def keep_filled_tensors(optimizer: object, loaded: Any) -> Iterator[None]:
    """Put the tensors that are in `loaded` back after a load_state_dict() of it, if the object is an optimizer.

    Nothing is put back where the user's code may load them in another way.
    """
    if not isinstance(optimizer, Optimizer) or not has_torchs_load(optimizer):
        yield
        return
    kept = {id(leaf) for leaf in tree_leaves(loaded) if isinstance(leaf, torch.Tensor)}
    settings = [dict(group) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    yield
    for before, group in zip(settings, optimizer.param_groups, strict=False):
        group.update({k: v for k, v in before.items() if id(v) in kept})
        if any(before.get(name) != group.get(name) for name in _PLACING):
            # The old tensors may be on another device than the optimizer now needs.
            continue
        for parameter in group["params"]:
            if parameter in state:
                optimizer.state[parameter] = _with_kept_tensors(
                    state[parameter], optimizer.state[parameter], kept
                )


def has_torchs_load(optimizer: Optimizer) -> bool:
    """Return True if load_state_dict() is torch's own, without hooks, and not one of the user's."""
    # Checked first: a wrapper may never have called Optimizer.__init__(), and has no hooks then.
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return False
    # Every other optimizer has these, and there is no public way to get them.
    return not (
        optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks  # noqa: SLF001
    )


def _with_kept_tensors(before: Any, after: Any, kept: set[int]) -> Any:
    """Return a parameter's state after the load, with the tensors in `kept` from before it."""
    if (
        type(before) is type(after) is dict
        and before.keys() == after.keys()
        and has_plain_leaves_only((*before.values(), *after.values()))
    ):
        # Most states: thousands of small dicts.
        return {key: before[key] if id(before[key]) in kept else value for key, value in after.items()}
    old, old_spec = tree_flatten(before)
    new, new_spec = tree_flatten(after)
    if old_spec != new_spec:
        # The checkpoint has other entries for this parameter.
        return after
    return tree_unflatten([a if id(a) in kept else b for a, b in zip(old, new, strict=True)], new_spec)
