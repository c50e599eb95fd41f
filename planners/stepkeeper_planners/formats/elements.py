"""Tensors as torch.distributed.checkpoint stores them: a torch.save file each, one behind another in one file."""

import io
import os
from dataclasses import dataclass
from math import prod
from typing import BinaryIO, final

import torch
from typing_extensions import Buffer, override

from stepkeeper_planners.errors import PickleRefusedError, SourceError
from stepkeeper_planners.formats.conversion import shown
from stepkeeper_planners.formats.files import CheckpointFiles, opened
from stepkeeper_planners.formats.records import PlacedArchive
from stepkeeper_planners.pickles.torch_files import vocabulary_of
from stepkeeper_planners.pickles.unpickling import unpickled

__all__ = ["Elements", "Window", "find_elements"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Where the elements of a chunk lie: in a file, in C order, without gaps."""

    file_name: str
    offset_bytes: int
    n_bytes: int


class Window(io.RawIOBase):
    """Part of a file, as a file."""

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


def find_elements(
    files: CheckpointFiles,
    place: tuple[str, int, int],
    *,
    fqn: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> Elements:
    """Where the elements of the chunk lie that is stored at that place: file, first byte, length. None was read.

    Raises:
        SourceError: there is no such tensor there, or its elements are in another order.
    """
    name, offset_bytes, n_bytes = place
    where = (
        f"{shown(fqn)}: bytes {offset_bytes} to {offset_bytes + n_bytes} of {shown(f'{files.name}/{name}')}"
    )
    known = files.elements_at(name, offset_bytes)
    if known is not None:
        size_bytes = prod(shape) * dtype.itemsize
        if known + size_bytes > offset_bytes + n_bytes:
            raise SourceError(f"{where} are too few for a {dtype} tensor of shape {shape}")
        return Elements(file_name=name, offset_bytes=known, n_bytes=size_bytes)
    with opened(files, name, shown(fqn)) as file:
        try:
            archive = _Sketch(io.BufferedReader(Window(file, offset_bytes, n_bytes)), n_bytes)
            tensor = unpickled(archive.record("data.pkl"), vocabulary_of(archive))
        except PickleRefusedError as error:
            raise SourceError(
                f"{where} are no stored tensor: the file is damaged or cut off, or another writer's ({error})"
            ) from error
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise SourceError(f"{where} don't hold a {dtype} tensor of shape {shape}, as the metadata says")
    if not tensor.is_contiguous() or len(archive.places) != 1 or tensor.is_conj() or tensor.is_neg():
        raise SourceError(
            f"{where} hold the elements in another order or form than C's; load and save it again"
        )
    skipped_bytes = int(tensor.storage_offset()) * dtype.itemsize
    return Elements(
        file_name=name,
        offset_bytes=offset_bytes + archive.places[0] + skipped_bytes,
        n_bytes=tensor.numel() * dtype.itemsize,
    )


@final
class _Sketch(PlacedArchive):
    """Its tensors are without elements; where these begin is noted."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        super().__init__(file, size_bytes)
        self.places: list[int] = []

    @override
    def content(self, name: str) -> torch.Tensor:
        start, n_bytes = self.place(name)
        self.places.append(start)
        return torch.empty(n_bytes, dtype=torch.uint8, device="meta")
