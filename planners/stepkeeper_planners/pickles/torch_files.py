"""Read the output of torch.save without torch.load: plain data and dense CPU tensors, nothing else.

torch.load(weights_only=True) runs no code either. But it believes the sizes and offsets in the file, and it accepts
everything that other modules of the process have added to its list of allowed names.
"""

import io
from collections import Counter, OrderedDict
from typing import Any, Final

import torch

from stepkeeper_planners.dtypes import all_dtypes
from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.numpy_arrays import NUMPY_NAMES
from stepkeeper_planners.pickles.torch_archive import StorageKind, TorchArchive
from stepkeeper_planners.pickles.torch_tensors import TENSOR_CLASS, TENSOR_MAKERS, make_with_attributes
from stepkeeper_planners.pickles.unpickling import Name, unpickle

__all__ = ["load_archive", "load_torch_bytes"]


def load_torch_bytes(data: bytes) -> Any:
    """Read the object that torch.save was given. Tensors are on the CPU and need no gradient.

    Raises PickleRefusedError if the bytes hold something other than plain data, or are damaged.
    """
    return load_archive(TorchArchive(io.BytesIO(data), len(data)))


def load_archive(archive: TorchArchive) -> Any:
    """Read the object that torch.save was given, with the tensors that the archive makes of its records.

    Raises PickleRefusedError if it holds something other than plain data, or is damaged.
    """
    return unpickle(archive.record("data.pkl"), _NAMES, persistent=archive.storage)


def _encoded(text: object, encoding: object) -> bytes:
    """Make bytes, which pickles of protocol 2 hold as encoded text."""
    if type(text) is not str or encoding != "latin1":
        raise PickleRefusedError("it encodes something other than bytes")
    return text.encode("latin1")


def _empty(kind: type) -> Any:
    """Return a function that makes an empty object of this kind, and takes no arguments."""

    def make(*arguments: object) -> object:
        if arguments:
            raise PickleRefusedError(f"it makes a {kind.__name__} from something")
        return kind()

    return make


def _counter(counts: object) -> "Counter[Any]":
    if type(counts) is not dict:
        raise PickleRefusedError("a Counter isn't made from counts")
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

_NAMES: Final[dict[Name, object]] = {
    **{("torch", name): dtype for name, dtype in all_dtypes().items()},
    **{("torch", name): StorageKind(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
    ("torch", "Tensor"): TENSOR_CLASS,
    ("torch.nn.parameter", "Parameter"): TENSOR_CLASS,
    ("torch._tensor", "_rebuild_from_type_v2"): make_with_attributes,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("collections", "OrderedDict"): _empty(OrderedDict),
    ("collections", "Counter"): _counter,
    ("_codecs", "encode"): _encoded,
    **{(module, "bytes"): _empty(bytes) for module in ("builtins", "__builtin__")},
    **{(module, "complex"): complex for module in ("builtins", "__builtin__")},
    **TENSOR_MAKERS,
    **NUMPY_NAMES,
}
