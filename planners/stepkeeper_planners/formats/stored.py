"""A checkpoint folder of torch.distributed.checkpoint, read one tensor at a time and each in small pieces."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from stepkeeper_planners.errors import SourceError, ValueDecodeError
from stepkeeper_planners.formats.conversion import BUFFER_BYTES, shown
from stepkeeper_planners.formats.elements import Elements, Window, find_elements
from stepkeeper_planners.formats.files import CheckpointFiles, opened
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata
from stepkeeper_planners.state.tree import Path as KeyPath
from stepkeeper_planners.state.values import decode_value

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Place = tuple[str, int, int]
"""The file in the folder, the first byte, how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    places: tuple[Place, ...]
    """For each box."""

    @property
    def n_bytes(self) -> int:
        """Of all elements."""
        return Box.whole(self.shape).volume * self.dtype.itemsize

    @property
    def first_place(self) -> Place:
        """Of its bytes. Who reads tensors in this order goes through the files."""
        return self.places[0] if self.places else ("", 0, 0)

    @property
    def content(self) -> tuple[object, ...]:
        """What is the same of tied tensors."""
        return self.dtype, self.shape, self.boxes, self.places


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint folder holds; nothing of it but the metadata was read."""

    files: CheckpointFiles
    tensors: dict[str, StoredTensor]
    values: dict[str, Place]
    """Where each value lies that is no tensor."""
    paths: dict[str, KeyPath]
    """Name → the keys that lead to it, where the checkpoint knows them; and what `nesting` noted there."""

    def first_of_tied(self) -> dict[str, str]:
        """Name → the first name with the very same bytes in the very same files; itself, for most."""
        firsts: dict[object, str] = {}
        tied: dict[str, str] = {}
        for fqn, tensor in self.tensors.items():
            tied[fqn] = firsts.setdefault(tensor.content, fqn) if tensor.n_bytes else fqn
        return tied

    def value(self, fqn: str) -> object:
        """The value of that name.

        Raises:
            SourceError: its file is missing or cut off.
            ValueDecodeError: its bytes are damaged, or hold a type that isn't on the list.
        """
        name, offset_bytes, n_bytes = self.values[fqn]
        with opened(self.files, name, shown(fqn)) as file:
            data = io.BufferedReader(Window(file, offset_bytes, n_bytes)).read()
        if len(data) < n_bytes:
            raise self._cut_off(fqn, name)
        try:
            return decode_value(fqn, data)
        except ValueDecodeError as error:
            raise ValueDecodeError(f"{error}. It stands in {shown(f'{self.files.name}/{name}')}") from error

    def elements(self, fqn: str) -> Iterator[memoryview]:
        """The tensor's bytes in C order, in pieces of a bounded size. A piece is good until the next is asked for.

        Raises:
            SourceError: a file is missing, damaged or cut off.
        """
        tensor = self.tensors[fqn]
        if not tensor.n_bytes:
            return
        parts = [
            (box, find_elements(self.files, place, fqn=fqn, dtype=tensor.dtype, shape=box.sizes))
            for box, place in zip(tensor.boxes, tensor.places, strict=True)
            if box.volume
        ]
        if len(parts) == 1:
            yield from self._flat_pieces(fqn, parts[0][1])
        else:
            yield from self._row_pieces(tensor, parts)

    def _flat_pieces(self, fqn: str, elements: Elements) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(BUFFER_BYTES, elements.n_bytes)))
        for start in range(0, elements.n_bytes, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, elements.n_bytes - start)]
            self._read(fqn, elements, start, piece)
            yield piece

    def _row_pieces(
        self, tensor: StoredTensor, parts: Sequence[tuple[Box, Elements]]
    ) -> Iterator[memoryview]:
        """Rows, along the first dimension: within them a chunk's elements lie together, whatever its box."""
        n_rows, row_bytes = tensor.shape[0], tensor.n_bytes // tensor.shape[0]
        # So many that of each chunk as much is used as is fetched.
        narrowest_bytes = min(elements.n_bytes // box.sizes[0] for box, elements in parts)
        step = min(n_rows, max(BUFFER_BYTES // row_bytes, -(-self.files.block_bytes // narrowest_bytes)))
        item_bytes = tensor.dtype.itemsize
        rows: Bytes = np.empty((step, *tensor.shape[1:], item_bytes), dtype=np.uint8)
        for first in range(0, n_rows, step):
            n_now = min(step, n_rows - first)
            block = Box(offsets=(first, *(0,) * (len(tensor.shape) - 1)), sizes=(n_now, *tensor.shape[1:]))
            for box, elements in parts:
                common = box.intersect(block)
                if common is None:
                    continue
                part: Bytes = np.empty((*common.sizes, item_bytes), dtype=np.uint8)
                start = (common.offsets[0] - box.offsets[0]) * (elements.n_bytes // box.sizes[0])
                self._read(tensor.fqn, elements, start, part.data.cast("B"))
                rows[common.shifted(block.offsets).slices] = part
            yield rows[:n_now].data.cast("B")

    def _read(self, fqn: str, elements: Elements, start: int, into: memoryview) -> None:
        with opened(self.files, elements.file_name, shown(fqn)) as file:
            file.seek(elements.offset_bytes + start)
            done = 0
            while done < len(into):
                n_read = file.readinto(into[done:])
                if not n_read:
                    raise self._cut_off(fqn, elements.file_name)
                done += n_read

    def _cut_off(self, fqn: str, name: str) -> SourceError:
        return SourceError(f"{shown(fqn)}: {shown(f'{self.files.name}/{name}')} is cut off")


def open_checkpoint(files: CheckpointFiles) -> Checkpoint:
    """The checkpoint in these files; every tensor's chunks cover it, and no bytes stand for two things.

    Raises:
        SourceError: there is none, or it was written in a way that isn't read here.
        MetadataDecodeError: its metadata is damaged, contradicts itself, or would run code.
    """
    metadata = _read_metadata(files)
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in (metadata.storage_data or {}).items()
    }
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Place] = {}
    for fqn, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            values[fqn] = _place(files, fqn, places.get((fqn, None)))
            continue
        boxes = tuple(Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in stored.chunks)
        tensors[fqn] = StoredTensor(
            fqn=fqn,
            dtype=stored.properties.dtype,
            shape=tuple(stored.size),
            boxes=boxes,
            places=tuple(_place(files, fqn, places.get((fqn, box.offsets))) for box in boxes),
        )
    _check_apart(files, tensors, values)
    paths: dict[str, KeyPath] = dict(metadata.planner_data) if isinstance(metadata.planner_data, dict) else {}
    return Checkpoint(files=files, tensors=tensors, values=values, paths=paths)


def _read_metadata(files: CheckpointFiles) -> Metadata:
    where = f"{files.name}/.metadata"
    missing = "is missing: there is no .metadata, so it is no checkpoint, or one that wasn't finished"
    with opened(files, ".metadata", "the checkpoint", missing=missing) as file:
        metadata = read_metadata(file.read(), name=where)
    check_metadata(metadata, name=where)
    return metadata


def _place(files: CheckpointFiles, fqn: str, info: Any) -> Place:
    """Where the bytes lie, of what torch's FileSystemWriter notes."""
    if info is None:
        raise SourceError(f"{shown(fqn)}: {files.name}/.metadata doesn't say where its bytes are")
    if getattr(info, "transform_descriptors", None):
        raise SourceError(
            f"{shown(fqn)}: was transformed when it was written ({info.transform_descriptors}); load and save it"
        )
    name = info.relative_path
    if Path(name).name != name:
        raise SourceError(
            f"{shown(fqn)}: {files.name}/.metadata names {shown(name)}, which isn't a file in this folder"
        )
    return name, int(info.offset), int(info.length)


def _check_apart(
    files: CheckpointFiles, tensors: Mapping[str, StoredTensor], values: Mapping[str, Place]
) -> None:
    """No two entries share bytes, but for tied tensors all of theirs: else a few bytes might become very many.

    Raises:
        SourceError: it names both, and the file.
    """
    firsts: dict[object, int] = {}
    owners: dict[Place, tuple[object, str]] = {}
    for fqn, tensor in tensors.items():
        tie = firsts.setdefault(tensor.content, len(firsts))
        for number, place in enumerate(tensor.places):
            _check_owner(files, place, owners.setdefault(place, ((tie, number), fqn)), ((tie, number), fqn))
    for fqn, place in values.items():
        _check_owner(files, place, owners.setdefault(place, (fqn, fqn)), (fqn, fqn))
    for before, after in pairwise(sorted(owners)):
        if before[0] == after[0] and before[1] + before[2] > after[1]:
            raise _shared(files, after, owners[before][1], owners[after][1])


def _check_owner(
    files: CheckpointFiles, place: Place, first: tuple[object, str], second: tuple[object, str]
) -> None:
    if first[0] != second[0]:
        raise _shared(files, place, first[1], second[1])


def _shared(files: CheckpointFiles, place: Place, first: str, second: str) -> SourceError:
    name, offset_bytes, n_bytes = place
    return SourceError(
        f"{files.name}/.metadata: {shown(first)} and {shown(second)} both have bytes {offset_bytes} to "
        f"{offset_bytes + n_bytes} of {shown(name)}, and aren't the same tensor"
    )
