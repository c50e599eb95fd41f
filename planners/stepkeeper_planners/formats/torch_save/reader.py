"""Read a torch.save file with `dcp.load`: one rank opens it, and sends its content to all ranks."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.formats.torch_save.source import open_torch_save
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.state.tree import FlatState, flatten_state
from stepkeeper_planners.state.values import encode_value

__all__ = ["TorchSaveReader"]

_BROADCAST_BYTES: Final = 64 << 20
"""Most bytes of a tensor that are sent at a time. A rank that needs nothing of it has memory for one such part."""


class TorchSaveReader(StorageReader):
    """Load a torch.save file into the state of a distributed job. Pass one to `dcp.load`, with any planner.

    Only the first rank opens the file, and nothing in it is run. Each tensor is sent once, whole, to all other ranks,
    which keep their parts. So a rank needs memory for its state and the largest tensor. Tensors that no rank requests
    are not read.

    Ranks: all ranks of the group make one and call `dcp.load` at the same time. If something fails while data arrives,
    all ranks raise it at the end. But if your planner raises in `finish_plan`, before the reader is called, on some
    ranks only, then the others wait for these until the group's timeout.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Name the file to read.

        Args:
            path: the torch.save file; None if `dcp.load` gets it as `checkpoint_id`.
            process_group: the group that `dcp.load` is given; None means the default one.
        """
        self._path = None if path is None else Path(path)
        self._group = process_group
        self._flat = FlatState(tensors={}, values={})
        self._metadata = Metadata(state_dict_metadata={})
        self._error: Exception | None = None

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Use another file, if one is named."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a file."""
        return Path(checkpoint_id).is_file()

    @override
    def read_metadata(self, *_: Any) -> Metadata:
        """Return the file's metadata on all ranks, as the first rank reads it.

        Ranks: collective.
        """
        found: list[Any] = [self._open() if self._is_first() else None]
        if self._world_size() > 1:
            dist.broadcast_object_list(found, group=self._group, group_src=0, device=self._device())
        # torch drops errors raised here, so set_up_storage_reader raises it.
        self._metadata, self._error = found[0]
        return self._metadata

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Raise the error of opening the file, if there was one.

        Raises:
            FileNotFoundError: there is no such file.
            SourceError: it isn't a torch.save file, is damaged, or holds more than dense tensors and plain values.
        """
        if self._error is not None:
            raise self._error

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan.

        Ranks: collective. A rank that fails takes part until the last tensor is sent, and raises then.
        """
        by_name: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_name.setdefault(item.storage_index.fqn, []).append(item)
        error: Exception | None = None
        for name in self._names_needed(by_name):
            items = by_name.get(name, [])
            try:
                _deliver(items, self._receive(name, wanted=bool(items)), planner)
            except Exception as failure:  # any error of the planner, the state or the file
                error = error or failure
        if error is not None:
            raise error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self) -> tuple[Metadata, Exception | None]:
        nothing = Metadata(state_dict_metadata={})
        try:
            if self._path is None:
                raise ValueError(
                    "no file to load from: use TorchSaveReader(path), or dcp.load(…, checkpoint_id=path)"
                )
            self._flat = flatten_state(open_torch_save(self._path))
            # Find tensors that can't be sent before any rank gets data.
            for name, tensor in self._flat.tensors.items():
                _check_dense(name, tensor)
            for name, value in self._flat.values.items():
                encode_value(name, value)
        except Exception as error:  # every rank has to raise it
            return nothing, error
        return _build_metadata(self._flat), None

    def _names_needed(self, by_name: dict[str, list[ReadItem]]) -> Sequence[str]:
        """Return the names that any rank requests, in the order of the file."""
        names = list(self._metadata.state_dict_metadata)
        if self._world_size() == 1:
            return [name for name in names if name in by_name]
        needed = torch.tensor([name in by_name for name in names], dtype=torch.uint8, device=self._device())
        if names:
            dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=self._group)
        return [name for name, is_needed in zip(names, needed.tolist(), strict=True) if is_needed]

    def _receive(self, name: str, *, wanted: bool) -> torch.Tensor | bytes | None:
        """Return the value, or the whole tensor if it is wanted. All ranks take part, and raise only at the end."""
        stored = self._metadata.state_dict_metadata[name]
        own: torch.Tensor | bytes | None = None
        failure: Exception | None = None
        if self._is_first():
            try:
                own = self._read_own(name)
            except Exception as error:  # other ranks must know before they wait for data
                failure = error
        if self._world_size() > 1:
            shared: list[Any] = [failure, own if isinstance(own, bytes) else None]
            dist.broadcast_object_list(shared, group=self._group, group_src=0, device=self._device())
            failure = shared[0]
            own = shared[1] if own is None else own
        if failure is not None:
            raise failure
        if self._world_size() == 1 or isinstance(own, bytes):
            return own
        assert isinstance(stored, TensorStorageMetadata)
        return self._broadcast(own, stored, wanted=wanted)

    def _read_own(self, name: str) -> torch.Tensor | bytes:
        """Return the data that the first rank sends."""
        if name in self._flat.values:
            return encode_value(name, self._flat.values[name])
        tensor = self._flat.tensors[self._flat.aliases.get(name, name)]
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def _broadcast(
        self, own: torch.Tensor | None, stored: TensorStorageMetadata, *, wanted: bool
    ) -> torch.Tensor | None:
        """Send the first rank's tensor; return it on the ranks that want it. Others take each part and drop it."""
        dtype, tensor = stored.properties.dtype, own
        failure: Exception | None = None
        if tensor is None and wanted:
            try:
                tensor = torch.empty(stored.size, dtype=dtype)
            except (RuntimeError, MemoryError) as error:
                # Raised at the end: the other ranks need this one's part in each broadcast.
                failure = error
        n_bytes = Box.whole(tuple(stored.size)).volume * dtype.itemsize
        flat = None if tensor is None or not n_bytes else tensor.reshape(-1).view(torch.uint8)
        device = self._device()
        for start in range(0, n_bytes, _BROADCAST_BYTES):
            end = min(start + _BROADCAST_BYTES, n_bytes)
            piece = torch.empty(end - start, dtype=torch.uint8) if flat is None else flat[start:end]
            sent = piece.to(device)
            dist.broadcast(sent, group=self._group, group_src=0)
            if sent is not piece:
                piece.copy_(sent)
        if failure is not None:
            raise failure
        return tensor if wanted else None

    def _world_size(self) -> int:
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    def _is_first(self) -> bool:
        return self._world_size() == 1 or dist.get_rank(self._group) == 0

    def _device(self) -> torch.device:
        """Return the device on which this group's collectives want their tensors."""
        accelerator = torch.accelerator.current_accelerator()
        # A group with a backend for the CPU, such as "cpu:gloo,cuda:nccl", takes tensors in host memory.
        if accelerator is None or "cpu:" in str(dist.get_backend_config(self._group)):
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise SourceError(f"{name}: only a dense tensor with elements can be loaded")


def _deliver(items: Sequence[ReadItem], data: torch.Tensor | bytes | None, planner: LoadPlanner) -> None:
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            assert isinstance(data, bytes)
            planner.load_bytes(item, io.BytesIO(data))
            continue
        assert isinstance(data, torch.Tensor)
        part = Box(offsets=tuple(item.storage_offsets), sizes=tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        target.copy_(data[part.slices])
        planner.commit_tensor(item, target)


def _build_metadata(flat: FlatState) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name in flat.paths:
        tensor = flat.tensors.get(flat.aliases.get(name, name))
        if tensor is None:
            entries[name] = BytesStorageMetadata()
            continue
        whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.size())
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), size=tensor.size(), chunks=[whole]
        )
    return Metadata(state_dict_metadata=entries, planner_data=dict(flat.paths))
