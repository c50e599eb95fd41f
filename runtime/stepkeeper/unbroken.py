"""The state after the last finished step, for as long as it is known that nothing has begun to change it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import has_plain_leaves_only, has_scalars_only, resolve_state
from stepkeeper_planners.state.values import decode_value, encode_value

__all__ = ["LastState"]

_SAMPLE_BYTES: Final = 16
_SAMPLED: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_IMMUTABLE: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class LastState:
    """What may be saved when an exception ends a training between two steps, or in the forward or backward of one.

    Values that are no tensors, those of a PerRank too, are what they were when the step was finished: a loader may have
    gone on. So all of them but numbers and texts are written down at each step, in full: what is large costs much.

    Tensors are the training's own, and all is given up as soon as any optimizer begins a step, or one of them was
    written to. Torch counts the writes to each tensor, but for those to its `.data` or to memory that it shares with
    numpy: of these some are seen, by a few elements of each tensor of floats that is in the host's memory, in whatever
    order its elements lie there. It has to be of torch's own two classes, as parameters and buffers are.
    """

    def __init__(self) -> None:
        self._step = 0
        self._tree: Any = None
        self._tensors: Sequence[torch.Tensor] = ()
        self._writes = 0
        self._samples = _Samples()
        self._sample: tuple[list[int], bytes] = [], b""
        self._hook: RemovableHandle | None = None

    def finished(self, step: int, state: Mapping[str, object]) -> None:
        """`state` is what it is after `step`."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._begins)
        tensors: list[torch.Tensor] = []
        tree = _held(resolve_state(state), tensors)
        # Of tensors made in inference mode nobody counts the writes.
        counted = not any(tensor.is_inference() for tensor in tensors)
        self._step, self._tree, self._tensors = step, tree if counted else None, tensors if counted else ()
        self._writes, self._sample = _writes(self._tensors), self._samples.of(self._tensors)

    def intact(self) -> tuple[int, Mapping[str, object]] | None:
        """The last finished step and its state; None if something has begun to change it, or none was finished."""
        if self._tree is None or _writes(self._tensors) != self._writes:
            return None
        if self._samples.of(self._tensors) != self._sample:
            return None
        return self._step, _given(self._tree)

    def close(self) -> None:
        """Optimizers are watched no more, and nothing is kept alive."""
        if self._hook is not None:
            self._hook.remove()
        self._forget()
        self._samples = _Samples()

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002  # torch's
        self._forget()

    def _forget(self) -> None:
        self._tree, self._tensors = None, ()


class _Samples:
    """A few elements of each tensor in the host's memory. The tensors looked at last are kept alive."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._places: list[torch.Tensor] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], bytes]:
        """Where the tensors lie now, and the bytes of these elements."""
        hosted = [each for each in tensors if each.is_cpu and each.dtype in _SAMPLED and _is_plain(each)]
        addresses = [each.data_ptr() for each in hosted]
        # An address is nothing else's while its place is kept.
        if addresses != self._addresses:
            self._addresses = addresses
            self._places = [place for each in hosted for place in _places(each)]
        return addresses, torch.cat(self._places).numpy().tobytes() if self._places else b""


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_neg()


def _places(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its first bytes, and as many from the middle. Where there are gaps in it: its first element, and a middle one."""
    in_memory = tensor.detach()
    if not in_memory.is_contiguous():
        # As channels_last and transposed ones are, in another order.
        in_memory = in_memory.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if not in_memory.is_contiguous():
        # What lies in the gaps is others' to write.
        middle = tuple(size // 2 for size in in_memory.shape)
        return _bytes_of(in_memory[(0,) * in_memory.dim()]), _bytes_of(in_memory[middle])
    data = _bytes_of(in_memory)
    half = len(data) // 2
    return data[:_SAMPLE_BYTES], data[half : half + _SAMPLE_BYTES]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its own memory, no copy of it."""
    return tensor.view(-1).view(torch.uint8)


def _writes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor._version for tensor in tensors)  # noqa: SLF001  # torch's own name for it


@dataclass(frozen=True, slots=True)
class _Held:
    """A value as it was."""

    data: bytes


def _held(node: Any, tensors: list[torch.Tensor]) -> Any:
    """What `resolve_state` gave, with values that don't change with the training; `tensors` gets what does."""
    if isinstance(node, dict):
        if has_plain_leaves_only(node.values()):
            tensors.extend(leaf for leaf in node.values() if isinstance(leaf, torch.Tensor))
            return node
        for key, part in node.items():
            node[key] = _held(part, tensors)
        return node
    if isinstance(node, list):
        return node if has_scalars_only(node) else [_held(part, tensors) for part in node]
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return node
    if isinstance(node, PerRank):
        return PerRank(_encoded(node.value), node.resize)
    return node if type(node) in _IMMUTABLE else _encoded(node)


def _encoded(value: object) -> object:
    try:
        return _Held(encode_value("", value))
    except UnsupportedValueError:
        # A save refuses it, by its name.
        return value


def _given(node: Any) -> Any:
    """The state that a save takes."""
    if isinstance(node, _Held):
        return decode_value("", node.data)
    if isinstance(node, PerRank):
        return PerRank(_given(node.value), node.resize)
    if isinstance(node, dict):
        for key, part in node.items():
            node[key] = _given(part)
        return node
    if isinstance(node, list) and not has_scalars_only(node):
        return [_given(part) for part in node]
    return node
