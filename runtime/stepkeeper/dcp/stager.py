"""Copy the state for `dcp.async_save`, into memory that is kept for the next save."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from stepkeeper.save.snapshot.copying import copy_tensors
from stepkeeper.save.snapshot.region import ALIGNMENT_BYTES, Region
from stepkeeper_planners import SPMDStager
from stepkeeper_planners.state.tree import flatten_state

__all__ = ["Stager"]

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""The classes whose tensors have nothing to copy but their elements."""

Layout = tuple[tuple[torch.dtype, torch.Size], ...]
"""Dtypes and shapes of the tensors in a buffer, in order."""


@final
class Stager(SPMDStager):
    """Copy the state so that it may change the moment `dcp.async_save` returns. Pass the same stager to each save.

    Tensors on the host, also the local parts of DTensors, are copied by the call into memory that is faulted in once
    and reused. Tensors of torch_xla are copied on their devices, as SPMDStager does; this needs SPMDSavePlanner. Tied
    tensors are copied once, and stay tied. A save that is still running keeps its memory: start the next save after it
    has ended, or a second buffer is allocated, and kept.
    """

    def __init__(self) -> None:
        """Create the stager; it takes no memory yet.

        Ranks:
            Each rank makes one, and `dcp.async_save` calls its methods.
        """
        self._buffers: list[_StagingBuffer] = []

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Take memory for a state like this one, so that the first save takes no longer than a later one.

        Args:
            state_dict: A state with the names, dtypes and shapes that saves will have.
        """
        sources = _host_tensors(flatten_state(state_dict).tensors)
        buffer = self._take_free_buffer()
        buffer.lay_out(_layout_of(sources))
        buffer.region.populate(buffer.region.size_bytes)

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state as it is now. The copy's memory is kept as long as this object lives.

        Args:
            state_dict: The state to save.

        Returns:
            The copy, with the same structure.

        Raises:
            DuplicateNameError: Two entries get the same name.
            UnsupportedValueError: A value is of a type that isn't stored.
            UnsupportedShardingError: A tensor's placement doesn't determine which device holds what.
        """
        self._buffer = self._take_free_buffer()
        staged = _Staged(super().stage(state_dict))
        self._buffer.user = weakref.ref(staged)
        return staged

    @override
    def copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the tensors: those on the host into the buffer, the others on their devices."""
        sources = _host_tensors(tensors)
        places = self._buffer.lay_out(_layout_of(sources))
        pairs = list(zip(places, sources.values(), strict=True))
        on_host = [pair for pair in pairs if pair[1].is_cpu]
        copy_tensors([place for place, _ in on_host], [source for _, source in on_host])
        for place, source in pairs:
            if not source.is_cpu:
                place.copy_(source)
        copied = super().copies({fqn: tensor for fqn, tensor in tensors.items() if fqn not in sources})
        for fqn, place in zip(sources, places, strict=True):
            copied[fqn] = _like(tensors[fqn], place)
        return copied

    @override
    def close(self) -> None:
        """Give the memory back, once no save uses it."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()

    def _take_free_buffer(self) -> "_StagingBuffer":
        """Take the largest buffer that no save uses, or a new one. Other unused buffers are given back."""
        free = [buffer for buffer in self._buffers if buffer.user() is None]
        chosen = max(free, key=lambda buffer: buffer.region.size_bytes, default=None) or _StagingBuffer()
        for buffer in free:
            if buffer is not chosen:
                buffer.close()
        self._buffers = [each for each in self._buffers if each not in free]
        self._buffers.append(chosen)
        return chosen


class _Staged(dict[str, Any]):
    """A staged state, which can be weakly referenced: its buffer is free once nothing references it."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class _StagingBuffer:
    """Memory for one staged state."""

    region: Region = field(default_factory=Region)
    user: Any = lambda: None
    """Returns the staged state whose memory this is, or None once that is gone."""

    layout: Layout = ()
    places: list[torch.Tensor] = field(default_factory=list)

    def lay_out(self, layout: Layout) -> list[torch.Tensor]:
        """Return places for tensors of these dtypes and shapes. The same layout again costs nothing."""
        if layout != self.layout:
            starts, end = [], 0
            for dtype, shape in layout:
                starts.append(end)
                end += -(-shape.numel() * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            # Old views would keep alive memory that is too small now.
            self.places = []
            self.region.reserve(end)
            self.places = [
                self.region.view_tensor(start, dtype, shape)
                for start, (dtype, shape) in zip(starts, layout, strict=True)
            ]
            self.layout = layout
        return self.places

    def close(self) -> None:
        """Give the memory back once no tensor lies in it."""
        self.layout, self.places = (), []
        self.region.close()


def _host_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the tensors that a copy into host memory is enough for, and return their local parts."""
    sources = {}
    for fqn, tensor in tensors.items():
        local = tensor
        if isinstance(tensor, DTensor) and tensor.device.type != "xla":
            with torch.no_grad():
                local = tensor.to_local()
        if type(local) in _PLAIN and local.device.type != "xla" and local.layout == torch.strided:
            sources[fqn] = local.detach()
    return sources


def _layout_of(sources: Mapping[str, torch.Tensor]) -> Layout:
    return tuple((source.dtype, source.shape) for source in sources.values())


def _like(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Wrap the copy `place` as a tensor of the same kind as `tensor`."""
    if not isinstance(tensor, DTensor):
        return place
    names, context = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]  # torch's way to take one apart
    # Since torch 2.15 the mesh is a part, too.
    parts = {name: getattr(tensor, name) for name in names} | {"_local_tensor": place}
    rebuild = type(tensor).__tensor_unflatten__
    copied: torch.Tensor = rebuild(parts, context, tensor.shape, tensor.stride())  # type: ignore[no-untyped-call]  # as above
    return copied.detach()
