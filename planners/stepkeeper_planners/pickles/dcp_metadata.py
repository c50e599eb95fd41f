"""Read `.metadata`, the pickle that describes a torch.distributed.checkpoint folder. Nothing in it is run."""

import pathlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from stepkeeper_planners.dtypes import all_dtypes
from stepkeeper_planners.errors import LayoutError, MetadataDecodeError, PickleRefusedError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_cover
from stepkeeper_planners.pickles.unpickling import Draft, Maker, Name, unpickle

__all__ = ["check_metadata", "list_indices", "read_metadata"]


def read_metadata(data: bytes, *, name: str) -> Metadata:
    """Read the bytes of a `.metadata` file, of this name, of any torch since 2.1. No code from them is run.

    Raises MetadataDecodeError if they are damaged, or name something that doesn't belong in metadata.
    """
    try:
        metadata = unpickle(data, _NAMES, key_types=frozenset({MetadataIndex}))
    except PickleRefusedError as error:
        raise MetadataDecodeError(f"{name}: this isn't the metadata of a checkpoint: {error}") from error
    if type(metadata) is not Metadata:
        raise MetadataDecodeError(
            f"{name}: this isn't the metadata of a checkpoint: it holds a {type(metadata).__name__}"
        )
    # Checked again: a pickle can change a list or dict after the object that holds it was checked.
    entries = metadata.state_dict_metadata
    if not _are_entries(entries) or not all(
        _are_chunks(entry.chunks) for entry in entries.values() if isinstance(entry, TensorStorageMetadata)
    ):
        raise MetadataDecodeError(
            f"{name}: this isn't the metadata of a checkpoint: a tensor's description is invalid"
        )
    return metadata


def check_metadata(metadata: Metadata, *, name: str) -> None:
    """Check that each tensor's chunks lie inside it, are disjoint and cover it, and that each has a place in a file.

    Raises MetadataDecodeError with the file's name and the tensor's.
    """
    storage = metadata.storage_data
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            try:
                boxes = [Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in stored.chunks]
                check_cover(fqn, tuple(stored.size), boxes)
            except LayoutError as error:
                raise MetadataDecodeError(f"{name}: {fqn}: {error}") from error
        # Other storage back ends keep other things in storage_data, or nothing.
        for index in list_indices(fqn, stored) if isinstance(storage, Mapping) else ():
            if index not in storage:
                place = "" if index.offset is None else f" at {tuple(index.offset)}"
                raise MetadataDecodeError(f"{name}: it doesn't locate {fqn}{place}")


def list_indices(fqn: str, stored: TensorStorageMetadata | BytesStorageMetadata) -> list[MetadataIndex]:
    """List the keys in a checkpoint's storage data that the parts of this entry have."""
    if isinstance(stored, BytesStorageMetadata):
        return [MetadataIndex(fqn)]
    return [MetadataIndex(fqn, chunk.offsets) for chunk in stored.chunks]


def _with_fields(kind: type, **checks: Callable[[Any], bool]) -> Callable[[], Draft]:
    """Return a function that makes instances and checks their fields. A newer torch may have more fields."""

    def fill(state: object) -> object:
        if type(state) is not dict or not all(type(key) is str for key in state):
            raise PickleRefusedError(f"the fields of a {kind.__name__} aren't a dict")
        for key, is_right in checks.items():
            # Optional fields have their default on the class.
            value = state[key] if key in state else getattr(kind, key)
            if not is_right(value):
                raise PickleRefusedError(f"{key} of a {kind.__name__} is a {type(value).__name__}")
        instance: object = object.__new__(kind)
        vars(instance).update(state)
        return instance

    return lambda: Draft(fill)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _is_place(path: object) -> bool:
    # The type comes first: hashing an endlessly nested object for the cache would crash the process.
    return type(path) is str and _is_inside(path)


@lru_cache(maxsize=4096)
def _is_inside(path: str) -> bool:
    """Return whether the path stays in the checkpoint's folder: a reader opens any file that it names."""
    parts = pathlib.PurePosixPath(path.replace("\\", "/"))
    return bool(path) and not parts.is_absolute() and ".." not in parts.parts


def _are_entries(entries: object) -> bool:
    return type(entries) is dict and all(
        type(fqn) is str and type(entry) in (TensorStorageMetadata, BytesStorageMetadata)
        for fqn, entry in entries.items()
    )


def _are_chunks(chunks: object) -> bool:
    return type(chunks) is list and all(type(chunk) is ChunkStorageMetadata for chunk in chunks)


def _is_length(value: object) -> bool:
    return type(value) is int and value >= 0


def _properties(state: object) -> TensorProperties:
    """Make the properties of a tensor. torch 2.15 adds strides after the others, and a newer one may add more."""
    kinds = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    if type(state) is not tuple or [type(part) for part in state[: len(kinds)]] != list(kinds):
        raise PickleRefusedError("the properties of a tensor are invalid")
    instance = object.__new__(TensorProperties)
    instance.__setstate__(state[:_N_PROPERTIES])  # type: ignore[no-untyped-call]  # torch's own way of filling one
    return instance


def _member(enum: object, name: object) -> _MEM_FORMAT_ENCODING:
    """Return the enum's member. Python 3.11's first releases wrote it as getattr(the class, a name)."""
    if type(enum) is not Maker or enum.name not in _FORMATS or type(name) is not str:
        raise PickleRefusedError("it gets an attribute of something; it was not run")
    return _MEM_FORMAT_ENCODING[name]


def _memory_format(number: object) -> _MEM_FORMAT_ENCODING:
    if type(number) is not int:
        raise PickleRefusedError("a memory format isn't made from its number")
    return _MEM_FORMAT_ENCODING(number)


def _layout(name: object) -> torch.layout:
    layouts = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
    return layouts[str(name)]


_N_PROPERTIES: Final = len(TensorProperties().__getstate__())  # type: ignore[no-untyped-call]  # torch's own
"""The number of properties that this torch writes and accepts."""

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_BEFORE_2_3: Final = "torch.distributed._shard.sharded_tensor.metadata"
_FORMATS: Final = {(_METADATA, "_MEM_FORMAT_ENCODING"), (_BEFORE_2_3, "MEM_FORMAT_ENCODING")}

_NAMES: Final[dict[Name, object]] = {
    **{("torch", name): dtype for name, dtype in all_dtypes().items()},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    **dict.fromkeys(_FORMATS, _memory_format),
    **{(module, "getattr"): _member for module in ("builtins", "__builtin__")},
    # The path where it was written: it is never opened, and may be of another operating system.
    **{
        (module, f"{pure}{system}Path"): kind
        for module in ("pathlib", "pathlib._local")
        for system, kind in (("Posix", pathlib.PurePosixPath), ("Windows", pathlib.PureWindowsPath))
        for pure in ("", "Pure")
    },
    **{(module, "TensorProperties"): lambda: Draft(_properties) for module in (_METADATA, _BEFORE_2_3)},
    (_METADATA, "BytesStorageMetadata"): BytesStorageMetadata,
    (_METADATA, "ChunkStorageMetadata"): _with_fields(
        ChunkStorageMetadata, offsets=_is(torch.Size), sizes=_is(torch.Size)
    ),
    (_METADATA, "Metadata"): _with_fields(
        Metadata,
        state_dict_metadata=_are_entries,
        storage_meta=_is(StorageMeta, type(None)),
        version=_is(str, type(None)),
    ),
    (_METADATA, "MetadataIndex"): _with_fields(
        MetadataIndex, fqn=_is(str), offset=_is(torch.Size, type(None)), index=_is(int, type(None))
    ),
    (_METADATA, "StorageMeta"): _with_fields(StorageMeta),
    (_METADATA, "TensorStorageMetadata"): _with_fields(
        TensorStorageMetadata, properties=_is(TensorProperties), size=_is(torch.Size), chunks=_are_chunks
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _with_fields(
        _StorageInfo, relative_path=_is_place, offset=_is_length, length=_is_length
    ),
}
