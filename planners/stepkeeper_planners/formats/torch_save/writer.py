"""Write a torch.save file in one pass: the tree first, then tensor by tensor."""

import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from typing_extensions import override

__all__ = ["DeferredTensor", "write_torch_save"]

_ALIGNMENT_BYTES: Final = 64
_PROTOCOL: Final = 2
"""The only pickle protocol that torch.load(weights_only=True) takes."""
_FORMAT_VERSION: Final = b"3\n"
_LOCAL_HEADER_BYTES: Final = 30
"""The size of the header before a record's name. Fields follow the name: the one for large files, and the padding."""
_ZIP64_EXTRA_BYTES: Final = 20
_FIELD_HEADER_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeferredTensor:
    """Stands in a tree for a tensor whose elements are written later. The same object twice means tied tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    n_bytes: int
    read_elements: Callable[[], Iterable[memoryview]]
    """Returns all bytes in C order, in pieces."""
    write_order: tuple[str, int, int] = ("", 0, 0)
    """Elements are requested in ascending order of this key."""

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # This is how this torch version pickles a tensor of this dtype.
        reduced: Any = torch.empty(0, dtype=self.dtype).__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
        rebuild, (storage, _, _, _, *rest) = reduced
        return rebuild, (_DeferredStorage(self, storage), 0, self.shape, _c_strides(self.shape), *rest)


@dataclass(frozen=True, slots=True)
class _DeferredStorage:
    tensor: DeferredTensor
    sample: Any
    """An empty storage of the same class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StorageContent:
    """The bytes of a storage. `owner` stays alive, so that its id isn't used again."""

    owner: object
    n_bytes: int
    pieces: Callable[[], Iterable[memoryview]]
    write_order: tuple[str, int, int] = ("", 0, 0)


def write_torch_save(file: BinaryIO, tree: object) -> None:
    """Write the file that torch.save(tree) makes, with a tensor in place of every DeferredTensor."""
    pickled = BytesIO()
    pickler = _Pickler(pickled, protocol=_PROTOCOL)
    pickler.dump(tree)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_record(file, archive, "data.pkl", pickled.tell(), [pickled.getbuffer()])
        for name, text in (("byteorder", sys.byteorder.encode()), ("version", _FORMAT_VERSION)):
            _write_record(file, archive, name, len(text), [memoryview(text)])
        for key, content in sorted(enumerate(pickler.contents), key=lambda pair: pair[1].write_order):
            _write_record(file, archive, f"data/{key}", content.n_bytes, content.pieces())


class _Pickler(pickle.Pickler):
    """Keep the storages out of the pickle, as torch.save does."""

    def __init__(self, file: BytesIO, *, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.contents: list[_StorageContent] = []
        self._keys: dict[int, str] = {}

    @override
    def persistent_id(self, obj: Any) -> tuple[object, ...] | None:
        if isinstance(obj, _DeferredStorage):
            tensor = obj.tensor
            content = _StorageContent(
                owner=tensor,
                n_bytes=tensor.n_bytes,
                pieces=tensor.read_elements,
                write_order=tensor.write_order,
            )
            return self._reference(obj.sample, id(tensor), content)
        if isinstance(obj, torch.TypedStorage | torch.UntypedStorage):
            data = _as_array(obj)
            content = _StorageContent(owner=data, n_bytes=data.nbytes, pieces=lambda: [data.data])
            return self._reference(obj, data.ctypes.data, content)
        return None

    def _reference(self, sample: Any, identity: int, content: _StorageContent) -> tuple[object, ...]:
        if identity not in self._keys:
            self._keys[identity] = str(len(self.contents))
            self.contents.append(content)
        kind, n_items = torch.UntypedStorage, content.n_bytes
        if isinstance(sample, torch.TypedStorage):
            # torch.save uses this name for the storage's class.
            kind = getattr(torch, sample._pickle_storage_type())  # type: ignore[no-untyped-call]  # noqa: SLF001
            n_items = content.n_bytes // sample.dtype.itemsize
        return ("storage", kind, self._keys[identity], "cpu", n_items)


def _write_record(
    file: BinaryIO, archive: zipfile.ZipFile, name: str, n_bytes: int, pieces: Iterable[memoryview]
) -> None:
    """Start the record's bytes at a multiple of 64, as torch does, so that they can be mapped as any dtype."""
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = n_bytes
    before = file.tell() + _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_EXTRA_BYTES + _FIELD_HEADER_BYTES
    padding = -before % _ALIGNMENT_BYTES
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for piece in pieces:
            record.write(piece)


def _as_array(storage: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # A typed storage's `untyped()` would warn that typed storages are deprecated.
    untyped = getattr(storage, "_untyped_storage", storage)
    return torch.empty(0, dtype=torch.uint8).set_(untyped).numpy()


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
