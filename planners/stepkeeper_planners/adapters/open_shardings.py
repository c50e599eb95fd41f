"""Track the XLA tensors whose shardings the user didn't set, and keep copies from setting one.

A sharding is open if the tensor has none: XLA chooses it in the next program that writes the tensor.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from stepkeeper_planners import adapters

__all__ = [
    "collect_shardings",
    "count_devices",
    "is_inferred",
    "is_sharded_as",
    "keep_shardings_open",
    "note_inferred",
    "skip_self_copies",
]

_INFERRED: Final = WeakTensorKeyDictionary()  # type: ignore[no-untyped-call]  # torch has no types for it
"""Tensors whose shardings `prime_optimizer` inferred, each with the sharding's text.

torch_xla itself can't distinguish them from tensors that the user marked.
"""


@contextmanager
def keep_shardings_open(tensors: Iterable[torch.Tensor]) -> Iterator[set[int]]:
    """Yield the ids of the tensors that have no sharding, and make sure that they have none afterwards.

    A program that reads such an XLA tensor, for example to copy it, pins its current placement: replicated on all
    devices. XLA could then no longer shard it, or tensors computed from it, in the next training step.
    """
    with_xla = "torch_xla" in sys.modules
    left_open = [tensor for tensor in tensors if not adapters.has_sharding(tensor)] if with_xla else []
    try:
        yield {id(tensor) for tensor in left_open}
    finally:
        adapters.clear_sharding(left_open)


def skip_self_copies() -> AbstractContextManager[object]:
    """Skip copies of XLA tensors onto themselves, which a load_state_dict() after a load makes.

    They would become a program that reads and writes every parameter.
    """
    return _SkipSelfCopies() if "torch_xla" in sys.modules else nullcontext()


class _SkipSelfCopies(TorchFunctionMode):
    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.copy_ and not kwargs and len(args) == 2 and _are_one_xla_tensor(*args):
            return args[0]
        return func(*args, **(kwargs or {}))


def collect_shardings(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the text of each XLA tensor's sharding, by name: "" for one that has none. Empty without SPMD."""
    if not count_devices():
        return {}
    return {fqn: _text(tensor) for fqn, tensor in tensors.items() if tensor.device.type == "xla"}


def note_inferred(tensors: Iterable[torch.Tensor]) -> None:
    """Record that the present shardings of these tensors are inferred, and not set by the user."""
    for tensor in tensors:
        if tensor.device.type == "xla" and (text := _text(tensor)):
            _INFERRED[_unwrap(tensor)] = text


def is_inferred(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has a sharding that was noted as inferred, and still has that one."""
    bare = _unwrap(tensor) if tensor.device.type == "xla" else tensor
    return bare in _INFERRED and _INFERRED[bare] == _text(bare)


def is_sharded_as(tensor: torch.Tensor, other: object) -> bool:
    """Return whether both are XLA tensors of one shape that have the same sharding."""
    if not isinstance(other, torch.Tensor) or not tensor.device.type == other.device.type == "xla":
        return False
    if tensor.shape != other.shape:
        return False
    text = _text(tensor)
    return bool(text) and text == _text(other)


def count_devices() -> int:
    """Return the number of devices that XLA shards tensors over, in all processes; 0 without SPMD."""
    if "torch_xla" not in sys.modules:
        return 0
    from stepkeeper_planners.adapters import xla_sharding

    return xla_sharding.count_devices()


def _are_one_xla_tensor(one: object, other: object) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.device.type == other.device.type == "xla"
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and adapters.identity(one) == adapters.identity(other)
    )


def _text(tensor: torch.Tensor) -> str:
    from stepkeeper_planners.adapters import xla_sharding

    return xla_sharding.sharding_text(tensor)


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    from stepkeeper_planners.adapters import xla_sharding

    return xla_sharding.unwrap(tensor)
