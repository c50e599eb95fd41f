"""Tensors as torch.distributed.checkpoint stores them: a torch.save file each, one behind another in one file."""

import io
import os
import pickle
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from typing_extensions import Buffer, override

from stepkeeper_planners.errors import SourceError

__all__ = ["Elements", "Window", "find_elements"]

_LOCAL_HEADER_BYTES: Final = 30
# What zipfile and torch.load raise on bytes that are no such file, depending on where they break.
_DAMAGE: Final = (
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    struct.error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Where the elements of a chunk lie: in a file, in C order, without gaps."""

    path: Path
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
    path: Path, offset_bytes: int, n_bytes: int, *, fqn: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Elements:
    """Where the elements of the chunk lie that is stored there; nothing of them was read.

    Raises:
        SourceError: there is no such tensor there, or its elements are in another order.
    """
    where = f"{fqn}: bytes {offset_bytes} to {offset_bytes + n_bytes} of {path}"
    try:
        with path.open("rb") as file:
            window = io.BufferedReader(Window(file, offset_bytes, n_bytes))
            with torch.serialization.skip_data():
                tensor = torch.load(window, map_location="cpu", weights_only=True)
            start_bytes, record_bytes = _data_record(window)
    except FileNotFoundError as error:
        raise SourceError(f"{fqn}: {path} is missing; the checkpoint isn't whole") from error
    except _DAMAGE as error:
        raise SourceError(
            f"{where} are no stored tensor: the file is damaged or cut off, or another writer's"
        ) from error
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise SourceError(f"{where} don't hold a {dtype} tensor of shape {shape}, as the metadata says")
    skipped_bytes = int(tensor.storage_offset()) * dtype.itemsize
    size_bytes = tensor.numel() * dtype.itemsize
    if not tensor.is_contiguous() or skipped_bytes + size_bytes > record_bytes:
        raise SourceError(f"{where} hold elements in another order than C's; load and save it again")
    return Elements(path=path, offset_bytes=offset_bytes + start_bytes + skipped_bytes, n_bytes=size_bytes)


def _data_record(window: "io.BufferedReader[Window]") -> tuple[int, int]:
    """The first byte of the one storage, from the start of the window, and its length."""
    with zipfile.ZipFile(window) as archive:
        records = [info for info in archive.infolist() if info.filename.split("/")[-2:-1] == ["data"]]
        (record,) = records
    if record.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile("compressed")
    window.seek(record.header_offset)
    header = window.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    return record.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes, record.file_size
