"""What torch.save wrote, read back without torch.load: plain data and dense CPU tensors, nothing else.

torch.load(weights_only=True) runs no code either, but believes what a blob says of sizes and places, and accepts
whatever some other module of the process has added to its list.
"""

import io
import sys
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Final

import numpy as np
import torch

from stepkeeper_planners.dtypes import all_dtypes
from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.numpy_arrays import NUMPY_BUILDS, NUMPY_CALLS, NUMPY_CONSTANTS
from stepkeeper_planners.pickles.unpickling import GlobalName, Vocabulary, unpickle

__all__ = ["TorchArchive", "load_torch_bytes", "torch_vocabulary"]

# What zipfile raises on bytes that are no archive, or a broken one.
_NO_ARCHIVE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    OSError,
)


def load_torch_bytes(data: bytes) -> object:
    """The object that torch.save was given; tensors are on the CPU and want no gradient.

    Raises:
        PickleRefusedError: it holds something else than plain data, or is damaged.
    """
    archive = TorchArchive(io.BytesIO(data), len(data))
    return unpickle(archive.record("data.pkl"), torch_vocabulary(archive))


def torch_vocabulary(archive: "TorchArchive") -> Vocabulary:
    """What a record `data.pkl` may name that stands beside these storages."""
    return Vocabulary(
        constants=_CONSTANTS,
        calls=_CALLS,
        builds=NUMPY_BUILDS,
        # nn.Module.state_dict() puts versions of its modules there, which no load of a checkpoint looks at.
        attributes=frozenset({OrderedDict}),
        persistent=archive.storage,
    )


@dataclass(frozen=True, slots=True)
class _StorageKind:
    """The class of a storage: which elements its bytes are."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    dtype: torch.dtype
    content: torch.Tensor
    """Its bytes."""


class TorchArchive:
    """A zip file as torch writes it: records as they are, under one folder."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._storages: dict[str, tuple[_StorageKind, _Storage]] = {}
        try:
            self._zip = zipfile.ZipFile(file)
        except _NO_ARCHIVE as error:
            raise PickleRefusedError(f"it is no archive ({error})") from error
        entries = self._zip.infolist()
        self.names = frozenset(entry.filename for entry in entries)
        if len(self.names) != len(entries):
            raise PickleRefusedError("two records of it have one name")
        # Compressed, or lying over each other, few bytes might become very many.
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise PickleRefusedError("a record of it is compressed or encrypted")
        if sum(entry.file_size for entry in entries) > size_bytes:
            raise PickleRefusedError("its records hold more than the whole")
        roots = [name.removesuffix("data.pkl") for name in self.names if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise PickleRefusedError("it has no data.pkl, or several")
        self.root = roots[0]
        if f"{self.root}byteorder" in self.names and self.record("byteorder") != sys.byteorder.encode():
            raise PickleRefusedError(f"it was written by a machine that isn't {sys.byteorder}-endian")

    def record(self, name: str) -> bytes:
        """The bytes of a record."""
        try:
            return self._zip.read(self.root + name)
        except _NO_ARCHIVE as error:
            raise PickleRefusedError(f"record {name} can't be read ({error})") from error

    def entry(self, name: str) -> zipfile.ZipInfo:
        """Where a record is."""
        try:
            return self._zip.getinfo(self.root + name)
        except KeyError as error:
            raise PickleRefusedError(f"record {name} is missing") from error

    def content(self, name: str) -> torch.Tensor:
        """The bytes of a record, as a tensor."""
        read = self.record(name)
        return (
            torch.frombuffer(bytearray(read), dtype=torch.uint8)
            if read
            else torch.empty(0, dtype=torch.uint8)
        )

    def storage(self, identity: object) -> _Storage:
        """What a pickle refers to by this identity. Each record is read once."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise PickleRefusedError("it refers to something that is no storage")
        _, kind, key, _, length = identity
        if type(kind) is not _StorageKind or type(key) is not str or not key.isdecimal():
            raise PickleRefusedError("it refers to a storage of an unknown kind")
        if key not in self._storages:
            storage = _Storage(kind.dtype, self.content(f"data/{key}"))
            self._storages[key] = (kind, storage)
        first_kind, storage = self._storages[key]
        if kind != first_kind or length != storage.content.numel() // kind.dtype.itemsize:
            raise PickleRefusedError(f"storage {key} isn't as long as it should be")
        return storage


def _tensor(storage: object, offset: object, sizes: object, strides: object, *rest: object) -> torch.Tensor:
    """`rest`: whether it wants a gradient, its hooks, perhaps what it has beside its elements."""
    if type(storage) is not _Storage or not 2 <= len(rest) <= 3:
        raise PickleRefusedError("a tensor has no storage, or something beside its elements")
    return _marked(_view(storage, storage.dtype, offset, (sizes, strides)), rest[2:])


def _typed_tensor(
    storage: object, offset: object, sizes: object, strides: object, *rest: object
) -> torch.Tensor:
    """As above, with the dtype as the third of `rest`."""
    if type(storage) is not _Storage or not 3 <= len(rest) <= 4:
        raise PickleRefusedError("a tensor has no storage, or something beside its elements")
    dtype = rest[2]
    if type(dtype) is not torch.dtype or dtype in _UNREAD:
        raise PickleRefusedError(f"a tensor has dtype {dtype}")
    return _marked(_view(storage, dtype, offset, (sizes, strides)), rest[3:])


def _marked(tensor: torch.Tensor, marks: tuple[object, ...]) -> torch.Tensor:
    """Conjugated or negated, where that is noted instead of done."""
    for mark in marks:
        if not mark:
            continue
        if type(mark) is not dict or not {"conj", "neg"}.issuperset(mark) or set(mark.values()) != {True}:
            raise PickleRefusedError("a tensor has something beside its elements")
        tensor = tensor.conj() if "conj" in mark else tensor
        tensor = torch._neg_view(tensor) if "neg" in mark else tensor  # noqa: SLF001 — its one maker
    return tensor


def _view(storage: _Storage, dtype: torch.dtype, offset: Any, shape: tuple[Any, Any]) -> torch.Tensor:
    """The elements at that place of the storage, if they are there: torch would make the storage longer."""
    sizes, strides = shape
    if (
        type(sizes) is not tuple
        or type(strides) is not tuple
        or len(sizes) != len(strides)
        or len(sizes) > 64
    ):
        raise PickleRefusedError("the shape of a tensor is none")
    if not all(type(number) is int and number >= 0 for number in (offset, *sizes, *strides)):
        raise PickleRefusedError("the shape of a tensor is none")
    n_items = prod(sizes)
    n_stored = storage.content.numel() // dtype.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if n_items and (last >= n_stored or n_items > n_stored):
        raise PickleRefusedError(f"a tensor of shape {sizes} lies outside of its {n_stored} stored elements")
    if not n_items:
        return torch.empty(sizes, dtype=dtype)
    stored = storage.content[: n_stored * dtype.itemsize].view(dtype)
    return stored.as_strided(sizes, strides, offset)


def _parameter(data: object, _requires_grad: object, _hooks: object, *_attributes: object) -> torch.Tensor:
    if type(data) is not torch.Tensor:
        raise PickleRefusedError("a parameter is no tensor")
    return data


def _of_device(data: object, dtype: object, _device: object, _requires_grad: object) -> torch.Tensor:
    """A tensor of an accelerator that torch.save writes from the host, as XLA's."""
    if type(data) is np.ndarray:
        data = torch.from_numpy(data)
    if type(data) is not torch.Tensor or type(dtype) is not torch.dtype or dtype in _UNREAD:
        raise PickleRefusedError("a tensor of a device isn't made of its elements and their dtype")
    return data.to(dtype)


def _with_attributes(make: object, kind: object, arguments: object, _attributes: object) -> object:
    """A tensor to which somebody gave Python attributes. They are no part of it for a checkpoint."""
    if type(make) is not GlobalName or make.name not in _TENSORS or type(arguments) is not tuple:
        raise PickleRefusedError("a tensor with attributes isn't made as one")
    if kind is not _TENSOR_CLASS:
        raise PickleRefusedError("it holds a tensor of a class of its own")
    return _TENSORS[make.name](*arguments)


def _encoded(text: object, encoding: object) -> bytes:
    """Bytes, as pickles of protocol 2 have them."""
    if type(text) is not str or encoding != "latin1":
        raise PickleRefusedError("it encodes something else than bytes")
    return text.encode("latin1")


def _nothing(kind: type) -> Any:
    def make(*arguments: object) -> object:
        if arguments:
            raise PickleRefusedError(f"it makes a {kind.__name__} of something")
        return kind()

    return make


def _complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise PickleRefusedError("a complex number isn't made of two floats")
    return complex(real, imaginary)


def _size(sizes: object) -> torch.Size:
    if type(sizes) is not tuple:
        raise PickleRefusedError("a size isn't made of a tuple")
    return torch.Size(sizes)


def _device(kind: object, *index: object) -> torch.device:
    if type(kind) is not str or not all(type(number) is int for number in index):
        raise PickleRefusedError("a device isn't made of its name and number")
    return torch.device(kind, *index)


def _counter(counts: object) -> "Counter[Any]":
    if type(counts) is not dict:
        raise PickleRefusedError("a Counter isn't made of counts")
    return Counter(counts)


_STORAGES: Final = {
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_TENSOR_CLASS: Final = object()
_TENSORS: Final[dict[tuple[str, str], Callable[..., torch.Tensor]]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _of_device,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _of_device,
}
_UNREAD: Final = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_CONSTANTS: Final = {
    **{("torch", name): dtype for name, dtype in all_dtypes().items()},
    **{("torch", name): _StorageKind(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageKind(torch.uint8),
    ("torch", "Tensor"): _TENSOR_CLASS,
    ("torch.nn.parameter", "Parameter"): _TENSOR_CLASS,
    **NUMPY_CONSTANTS,
}
_CALLS: Final = {
    **_TENSORS,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("collections", "OrderedDict"): _nothing(OrderedDict),
    ("collections", "Counter"): _counter,
    ("_codecs", "encode"): _encoded,
    **{(module, "bytes"): _nothing(bytes) for module in ("builtins", "__builtin__")},
    **{(module, "complex"): _complex for module in ("builtins", "__builtin__")},
    **NUMPY_CALLS,
}
