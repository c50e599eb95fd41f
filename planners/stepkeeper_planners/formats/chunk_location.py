"""Locate the elements of stored tensors.

torch.distributed.checkpoint stores each chunk as a torch.save file, many of them one after another in one file.
"""

import io
import os
from dataclasses import dataclass
from math import prod
from typing import BinaryIO, final

import torch
from typing_extensions import Buffer, override

from stepkeeper_planners.errors import PickleRefusedError, SourceError, printable
from stepkeeper_planners.formats.checkpoint_files import CheckpointFiles, open_source_file
from stepkeeper_planners.pickles.torch_archive import TorchArchive
from stepkeeper_planners.pickles.torch_files import load_archive

__all__ = ["ChunkLocation", "FileWindow", "locate_chunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLocation:
    """The bytes of a file in which the elements of a chunk lie, in C order, without gaps."""

    file_name: str
    offset_bytes: int
    n_bytes: int


class FileWindow(io.RawIOBase):
    """Part of a file, opened as a file."""

    def __init__(self, file: io.BufferedReader, offset_bytes: int, n_bytes: int) -> None:
        self._file, self._start, self._n_bytes, self._position = file, offset_bytes, n_bytes, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._n_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        into = memoryview(buffer).cast("B")
        n_bytes = max(0, min(len(into), self._n_bytes - self._position))
        self._file.seek(self._start + self._position)
        n_read = self._file.readinto(into[:n_bytes])
        self._position += n_read
        return int(n_read)


def locate_chunk(
    files: CheckpointFiles,
    location: tuple[str, int, int],
    *,
    fqn: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> ChunkLocation:
    """Locate the elements of a chunk of this dtype and shape, without reading them.

    `location` is the file, the chunk's first byte in it, and its size in bytes. Raises SourceError if there
    is no such tensor there, or its elements are in another order.
    """
    name, offset_bytes, n_bytes = location
    where = f"{printable(fqn)}: bytes {offset_bytes} to {offset_bytes + n_bytes} of {printable(f'{files.name}/{name}')}"
    start_bytes = files.elements_at(name, offset_bytes)
    if start_bytes is not None:
        size_bytes = prod(shape) * dtype.itemsize
        if start_bytes + size_bytes > offset_bytes + n_bytes:
            raise SourceError(f"{where} are too few for a {dtype} tensor of shape {shape}")
        return ChunkLocation(file_name=name, offset_bytes=start_bytes, n_bytes=size_bytes)
    with open_source_file(files, name, printable(fqn)) as file:
        try:
            archive = _MetaArchive(io.BufferedReader(FileWindow(file, offset_bytes, n_bytes)), n_bytes)
            tensor = load_archive(archive)
        except PickleRefusedError as error:
            raise SourceError(
                f"{where} aren't a stored tensor: the file is damaged or cut off, or another writer's ({error})"
            ) from error
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise SourceError(f"{where} don't hold a {dtype} tensor of shape {shape}, as the metadata states")
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if not tensor.is_contiguous() or len(archive.element_offsets) != 1 or is_lazy:
        raise SourceError(
            f"{where} don't hold the elements in C order; load the checkpoint and save it again"
        )
    skipped_bytes = int(tensor.storage_offset()) * dtype.itemsize
    return ChunkLocation(
        file_name=name,
        offset_bytes=offset_bytes + archive.element_offsets[0] + skipped_bytes,
        n_bytes=tensor.numel() * dtype.itemsize,
    )


@final
class _MetaArchive(TorchArchive):
    """Make tensors without elements, and note where their elements begin."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        super().__init__(file, size_bytes)
        self.element_offsets: list[int] = []

    @override
    def content(self, name: str) -> torch.Tensor:
        start, n_bytes = self.locate_record(name)
        self.element_offsets.append(start)
        return torch.empty(n_bytes, dtype=torch.uint8, device="meta")
