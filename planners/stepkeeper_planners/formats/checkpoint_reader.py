"""Read a checkpoint folder of torch.distributed.checkpoint one tensor at a time, each in small pieces."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from stepkeeper_planners.errors import SourceError, ValueDecodeError, printable
from stepkeeper_planners.flat_names import find_flat_names
from stepkeeper_planners.formats.checkpoint_files import CheckpointFiles, open_source_file
from stepkeeper_planners.formats.chunk_location import ChunkLocation, FileWindow, locate_chunk
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata
from stepkeeper_planners.state.tree import Path as KeyPath
from stepkeeper_planners.state.values import decode_value

__all__ = ["CheckpointReader", "CheckpointTensor", "open_checkpoint"]

BUFFER_BYTES: Final = 16 << 20
"""Number of bytes that are read at a time."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Location = tuple[str, int, int]
"""A file in the folder, the first byte in it, and the number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """A tensor in a checkpoint, and where its chunks lie."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    locations: tuple[Location, ...]
    """Place of the chunk of each box."""

    @property
    def n_bytes(self) -> int:
        """The size of all elements, in bytes."""
        return Box.whole(self.shape).volume * self.dtype.itemsize

    @property
    def first_location(self) -> Location:
        """The location of its first chunk. Reading tensors in this order reads each file from front to back."""
        return self.locations[0] if self.locations else ("", 0, 0)

    @property
    def content(self) -> tuple[object, ...]:
        """A key that is equal for tied tensors."""
        return self.dtype, self.shape, self.boxes, self.locations


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReader:
    """Reads the tensors and values of a checkpoint. Opening it reads nothing but the metadata."""

    files: CheckpointFiles
    tensors: dict[str, CheckpointTensor]
    values: dict[str, Location]
    """Place of each value that is not a tensor."""
    paths: dict[str, KeyPath]
    """The keys that lead to each name, if the checkpoint has them, and the marks of `encode_nesting`.

    A mark shows what a name can't: a key that isn't a string, or an empty dict.
    """

    def find_tied(self) -> dict[str, str]:
        """Return for each name the first name with the very same bytes in the same files; for most, the name itself."""
        firsts: dict[object, str] = {}
        tied: dict[str, str] = {}
        for fqn, tensor in self.tensors.items():
            tied[fqn] = firsts.setdefault(tensor.content, fqn) if tensor.n_bytes else fqn
        return tied

    def read_value(self, fqn: str) -> object:
        """Read and decode a value. Raises SourceError if its file is missing or cut off, and as `decode_value`."""
        name, offset_bytes, n_bytes = self.values[fqn]
        with open_source_file(self.files, name, printable(fqn)) as file:
            data = io.BufferedReader(FileWindow(file, offset_bytes, n_bytes)).read()
        if len(data) < n_bytes:
            raise self._cut_off_error(fqn, name)
        try:
            return decode_value(fqn, data)
        except ValueDecodeError as error:
            raise ValueDecodeError(
                f"{error}. It is stored in {printable(f'{self.files.name}/{name}')}"
            ) from error

    def read_elements(self, fqn: str) -> Iterator[memoryview]:
        """Read the tensor's bytes in C order, in pieces of bounded size. Each piece is valid until the next one.

        Raises SourceError if a file is missing, damaged or cut off.
        """
        tensor = self.tensors[fqn]
        if not tensor.n_bytes:
            return
        parts = [
            (box, locate_chunk(self.files, location, fqn=fqn, dtype=tensor.dtype, shape=box.sizes))
            for box, location in zip(tensor.boxes, tensor.locations, strict=True)
            if box.volume
        ]
        if len(parts) == 1:
            yield from self._read_flat(fqn, parts[0][1])
        else:
            yield from self._read_rows(tensor, parts)

    def _read_flat(self, fqn: str, elements: ChunkLocation) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(BUFFER_BYTES, elements.n_bytes)))
        for start in range(0, elements.n_bytes, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, elements.n_bytes - start)]
            self._read_into(fqn, elements, start, piece)
            yield piece

    def _read_rows(
        self, tensor: CheckpointTensor, parts: Sequence[tuple[Box, ChunkLocation]]
    ) -> Iterator[memoryview]:
        """Read rows along the first dimension. Within them, the elements of any chunk are contiguous."""
        n_rows, row_bytes = tensor.shape[0], tensor.n_bytes // tensor.shape[0]
        # As many rows as the buffer holds, but enough to use every byte that is fetched of each chunk.
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
                self._read_into(tensor.fqn, elements, start, part.data.cast("B"))
                rows[common.relative_to(block.offsets).slices] = part
            yield rows[:n_now].data.cast("B")

    def _read_into(self, fqn: str, elements: ChunkLocation, start: int, into: memoryview) -> None:
        with open_source_file(self.files, elements.file_name, printable(fqn)) as file:
            file.seek(elements.offset_bytes + start)
            done = 0
            while done < len(into):
                n_read = file.readinto(into[done:])
                if not n_read:
                    raise self._cut_off_error(fqn, elements.file_name)
                done += n_read

    def _cut_off_error(self, fqn: str, name: str) -> SourceError:
        return SourceError(f"{printable(fqn)}: {printable(f'{self.files.name}/{name}')} is cut off")


def open_checkpoint(files: CheckpointFiles) -> CheckpointReader:
    """Open a checkpoint, and check that every tensor's chunks cover it.

    Raises SourceError if there is none in a supported form; MetadataDecodeError if its metadata is damaged,
    contradicts itself, or would run code.
    """
    metadata = _read_metadata(files)
    locations = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in (metadata.storage_data or {}).items()
    }
    tensors: dict[str, CheckpointTensor] = {}
    values: dict[str, Location] = {}
    # Skip the flat names of an optimizer's options, one for each parameter: they repeat the options of its groups.
    further = find_flat_names(metadata.planner_data, metadata.state_dict_metadata)
    for fqn, stored in metadata.state_dict_metadata.items():
        if fqn in further:
            continue
        if not isinstance(stored, TensorStorageMetadata):
            values[fqn] = _parse_location(files, fqn, locations.get((fqn, None)))
            continue
        boxes = tuple(Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in stored.chunks)
        tensors[fqn] = CheckpointTensor(
            fqn=fqn,
            dtype=stored.properties.dtype,
            shape=tuple(stored.size),
            boxes=boxes,
            locations=tuple(_parse_location(files, fqn, locations.get((fqn, box.offsets))) for box in boxes),
        )
    paths: dict[str, KeyPath] = dict(metadata.planner_data) if isinstance(metadata.planner_data, dict) else {}
    return CheckpointReader(files=files, tensors=tensors, values=values, paths=paths)


def _read_metadata(files: CheckpointFiles) -> Metadata:
    where = f"{files.name}/.metadata"
    missing = "is missing: without .metadata this isn't a checkpoint, or its save didn't finish"
    with open_source_file(files, ".metadata", "the checkpoint", missing=missing) as file:
        metadata = read_metadata(file.read(), name=where)
    check_metadata(metadata, name=where)
    return metadata


def _parse_location(files: CheckpointFiles, fqn: str, info: Any) -> Location:
    """Return where an entry's bytes lie, from the record of torch's FileSystemWriter."""
    if info is None:
        raise SourceError(f"{printable(fqn)}: {files.name}/.metadata doesn't locate its bytes")
    if getattr(info, "transform_descriptors", None):
        raise SourceError(
            f"{printable(fqn)}: was transformed when it was written ({info.transform_descriptors}); load it and save "
            "it again"
        )
    name = info.relative_path
    if Path(name).name != name:
        raise SourceError(
            f"{printable(fqn)}: {files.name}/.metadata names {printable(name)}, which isn't a file in this folder"
        )
    return name, int(info.offset), int(info.length)
