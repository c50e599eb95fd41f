"""A torch.save file as what `dcp.load` reads: one rank opens it, all get what they need of it."""

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
from stepkeeper_planners.state.tree import FlatState, gather_state
from stepkeeper_planners.state.values import encode_value

__all__ = ["TorchSaveReader"]

_BROADCAST_BYTES: Final = 64 << 20
"""Of a tensor, sent at a time; a rank that needs nothing of it has memory for one."""


class TorchSaveReader(StorageReader):
    """Reads a torch.save file into the state of a distributed job: for `dcp.load`, with SPMDLoadPlanner or torch's.

    Only the first rank opens the file, nothing in it is run, and each tensor goes once to all others, whole; which
    then keep their parts. So a rank has memory for its state and the largest tensor. Tensors that no rank asks for
    are not read.

    Ranks: all of the group call `dcp.load` with one, at the same time. What fails while data arrives is raised on all
    of them at the end; but if a planner of yours raises in `finish_plan` on some ranks only, which is before the reader
    is called, the others wait for these until the group's timeout.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """`process_group` is what `dcp.load` gets as such; the default one if None."""
        self._path = None if path is None else Path(path)
        self._group = process_group
        self._flat = FlatState(tensors={}, values={})
        self._metadata = Metadata(state_dict_metadata={})
        self._error: Exception | None = None

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another file, if one is named."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a file."""
        return Path(checkpoint_id).is_file()

    @override
    def read_metadata(self, *_: Any) -> Metadata:
        """What the file holds, on all ranks, as the first one sees it."""
        found: list[Any] = [self._open() if self._is_first() else None]
        if self._world_size() > 1:
            dist.broadcast_object_list(found, group=self._group, group_src=0, device=self._device())
        # torch drops what is raised here; it is raised where it doesn't.
        self._metadata, self._error = found[0]
        return self._metadata

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """The file was opened.

        Raises:
            FileNotFoundError: there is none.
            SourceError: it is no torch.save file, a damaged one, or holds more than dense tensors and plain values.
        """
        if self._error is not None:
            raise self._error

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every item of the plan is read.

        Ranks: every rank takes part until the last tensor is sent, even if one fails; only then does that one raise.
        """
        by_name: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_name.setdefault(item.storage_index.fqn, []).append(item)
        error: Exception | None = None
        for name in self._names_needed(by_name):
            items = by_name.get(name, [])
            try:
                _deliver(items, self._receive(name, wanted=bool(items)), planner)
            except Exception as failure:  # the planner's, the state's or the file's, whatever it is
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
                    "no file is named: TorchSaveReader(path), or dcp.load(…, checkpoint_id=path)"
                )
            self._flat = gather_state(open_torch_save(self._path))
            # What can't be sent is found before any rank has got anything.
            for name, tensor in self._flat.tensors.items():
                _check_dense(name, tensor)
            for name, value in self._flat.values.items():
                encode_value(name, value)
        except Exception as error:  # every rank has to hear of it
            return nothing, error
        return _build_metadata(self._flat), None

    def _names_needed(self, by_name: dict[str, list[ReadItem]]) -> Sequence[str]:
        """In the order of the file: what any rank asks for."""
        names = list(self._metadata.state_dict_metadata)
        if self._world_size() == 1:
            return [name for name in names if name in by_name]
        needed = torch.tensor([name in by_name for name in names], dtype=torch.uint8, device=self._device())
        if names:
            dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=self._group)
        return [name for name, is_needed in zip(names, needed.tolist(), strict=True) if is_needed]

    def _receive(self, name: str, *, wanted: bool) -> torch.Tensor | bytes | None:
        """The whole tensor, where it is wanted; or the value.

        Ranks: all have taken part in what it takes to send it, whatever is raised on which of them.
        """
        stored = self._metadata.state_dict_metadata[name]
        own: torch.Tensor | bytes | None = None
        failure: Exception | None = None
        if self._is_first():
            try:
                own = self._read_own(name)
            except Exception as error:  # the others have to hear of it before they wait for what doesn't come
                failure = error
        if self._world_size() > 1:
            told: list[Any] = [failure, own if isinstance(own, bytes) else None]
            dist.broadcast_object_list(told, group=self._group, group_src=0, device=self._device())
            failure = told[0]
            own = told[1] if own is None else own
        if failure is not None:
            raise failure
        if self._world_size() == 1 or isinstance(own, bytes):
            return own
        assert isinstance(stored, TensorStorageMetadata)
        return self._broadcast(own, stored, wanted=wanted)

    def _read_own(self, name: str) -> torch.Tensor | bytes:
        """What the first rank sends."""
        if name in self._flat.values:
            return encode_value(name, self._flat.values[name])
        tensor = self._flat.tensors[self._flat.aliases.get(name, name)]
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def _broadcast(
        self, own: torch.Tensor | None, stored: TensorStorageMetadata, *, wanted: bool
    ) -> torch.Tensor | None:
        """The first rank's tensor, where it is wanted."""
        dtype, tensor = stored.properties.dtype, own
        failure: Exception | None = None
        if tensor is None and wanted:
            try:
                tensor = torch.empty(stored.size, dtype=dtype)
            except (RuntimeError, MemoryError) as error:
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
        """Where this group's collectives want their tensors."""
        accelerator = torch.accelerator.current_accelerator()
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
