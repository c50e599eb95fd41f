"""A checkpoint folder of torch.distributed.checkpoint, read one tensor at a time and each in small pieces."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from stepkeeper_planners.boxes import Box
from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.formats.conversion import BUFFER_BYTES
from stepkeeper_planners.formats.elements import Elements, Window, find_elements
from stepkeeper_planners.metadata import check_metadata, read_metadata
from stepkeeper_planners.state import Path as KeyPath
from stepkeeper_planners.values import decode_value

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    places: tuple[tuple[str, int, int], ...]
    """For each box: the file in the folder, the first byte, how many."""

    @property
    def n_bytes(self) -> int:
        """Of all elements."""
        return Box.whole(self.shape).volume * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint folder holds; nothing of it but the metadata was read."""

    folder: Path
    tensors: dict[str, StoredTensor]
    values: dict[str, tuple[str, int, int]]
    """Where each value lies that is no tensor."""
    paths: dict[str, KeyPath]
    """Name → the keys that lead to it, where the checkpoint knows them; and what `nesting` noted there."""

    def first_of_tied(self) -> dict[str, str]:
        """Name → the first name with the very same bytes in the very same files; itself, for most."""
        firsts: dict[object, str] = {}
        tied: dict[str, str] = {}
        for fqn, tensor in self.tensors.items():
            seen = (tensor.dtype, tensor.shape, tensor.boxes, tensor.places)
            tied[fqn] = firsts.setdefault(seen, fqn) if tensor.n_bytes else fqn
        return tied

    def value(self, fqn: str) -> object:
        """The value of that name.

        Raises:
            SourceError: its file is missing or cut off.
            ValueDecodeError: its bytes are damaged, or hold a type that isn't on the list.
        """
        name, offset_bytes, n_bytes = self.values[fqn]
        try:
            with (self.folder / name).open("rb") as file:
                data = io.BufferedReader(Window(file, offset_bytes, n_bytes)).read()
        except FileNotFoundError as error:
            raise SourceError(
                f"{fqn}: {self.folder / name} is missing; the checkpoint isn't whole"
            ) from error
        if len(data) < n_bytes:
            raise SourceError(f"{fqn}: {self.folder / name} is cut off")
        return decode_value(fqn, data)

    def elements(self, fqn: str) -> Iterator[memoryview]:
        """The tensor's bytes in C order, in pieces of a bounded size. A piece is good until the next is asked for.

        Raises:
            SourceError: a file is missing, damaged or cut off.
        """
        tensor = self.tensors[fqn]
        if not tensor.n_bytes:
            return
        parts = [
            (box, self._find(tensor, box, place))
            for box, place in zip(tensor.boxes, tensor.places, strict=True)
            if box.volume
        ]
        if len(parts) == 1:
            yield from _flat_pieces(fqn, parts[0][1])
        else:
            yield from _row_pieces(tensor, parts)

    def _find(self, tensor: StoredTensor, box: Box, place: tuple[str, int, int]) -> Elements:
        name, offset_bytes, n_bytes = place
        return find_elements(
            self.folder / name, offset_bytes, n_bytes, fqn=tensor.fqn, dtype=tensor.dtype, shape=box.sizes
        )


def _flat_pieces(fqn: str, elements: Elements) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(BUFFER_BYTES, elements.n_bytes)))
    with elements.path.open("rb", buffering=0) as file:
        for start in range(0, elements.n_bytes, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, elements.n_bytes - start)]
            _read(fqn, file, elements, start, piece)
            yield piece


def _row_pieces(tensor: StoredTensor, parts: Sequence[tuple[Box, Elements]]) -> Iterator[memoryview]:
    """Rows, along the first dimension: within them a chunk's elements lie together, whatever its box."""
    n_rows, row_bytes = tensor.shape[0], tensor.n_bytes // tensor.shape[0]
    step = min(n_rows, max(1, BUFFER_BYTES // row_bytes))
    item_bytes = tensor.dtype.itemsize
    shape = (step, *tensor.shape[1:], item_bytes)
    rows: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(shape, dtype=np.uint8)
    for first in range(0, n_rows, step):
        last = min(first + step, n_rows)
        block = Box(offsets=(first, *(0,) * (len(tensor.shape) - 1)), sizes=(last - first, *tensor.shape[1:]))
        for box, elements in parts:
            common = box.intersect(block)
            if common is None:
                continue
            part: np.ndarray[Any, np.dtype[np.uint8]] = np.empty((*common.sizes, item_bytes), dtype=np.uint8)
            start = (common.offsets[0] - box.offsets[0]) * (elements.n_bytes // box.sizes[0])
            with elements.path.open("rb", buffering=0) as file:
                _read(tensor.fqn, file, elements, start, part.data.cast("B"))
            rows[common.shifted(block.offsets).slices] = part
        yield rows[: last - first].data.cast("B")


def _read(fqn: str, file: io.FileIO, elements: Elements, start: int, into: memoryview) -> None:
    file.seek(elements.offset_bytes + start)
    done = 0
    while done < len(into):
        n_read = file.readinto(into[done:])
        if not n_read:
            raise SourceError(f"{fqn}: {elements.path} is cut off")
        done += n_read


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in this folder; every tensor's chunks cover it.

    Raises:
        SourceError: there is none, or it was written in a way that isn't read here.
        MetadataDecodeError: its metadata is damaged, contradicts itself, or would run code.
    """
    metadata = _read_metadata(folder)
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in (metadata.storage_data or {}).items()
    }
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, tuple[str, int, int]] = {}
    for fqn, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            values[fqn] = _place(folder, fqn, places.get((fqn, None)))
            continue
        boxes = tuple(Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in stored.chunks)
        tensors[fqn] = StoredTensor(
            fqn=fqn,
            dtype=stored.properties.dtype,
            shape=tuple(stored.size),
            boxes=boxes,
            places=tuple(_place(folder, fqn, places.get((fqn, box.offsets))) for box in boxes),
        )
    paths: dict[str, KeyPath] = dict(metadata.planner_data) if isinstance(metadata.planner_data, dict) else {}
    return Checkpoint(folder=folder, tensors=tensors, values=values, paths=paths)


def _read_metadata(folder: Path) -> Metadata:
    path = folder / ".metadata"
    try:
        metadata = read_metadata(path.read_bytes(), name=str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(
            f"{folder} has no .metadata: it is no checkpoint, or one that wasn't finished"
        ) from error
    check_metadata(metadata, name=str(path))
    return metadata


def _place(folder: Path, fqn: str, info: Any) -> tuple[str, int, int]:
    """Where the bytes lie, of what torch's FileSystemWriter notes."""
    if info is None:
        raise SourceError(f"{fqn}: {folder / '.metadata'} doesn't say where its bytes are")
    if getattr(info, "transform_descriptors", None):
        raise SourceError(
            f"{fqn}: was transformed when it was written ({info.transform_descriptors}); load and save it"
        )
    name = info.relative_path
    if Path(name).name != name:
        raise SourceError(f"{fqn}: {folder / '.metadata'} names {name!r}, which isn't a file in this folder")
    return name, int(info.offset), int(info.length)
