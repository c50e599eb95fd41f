"""Read another writer's checkpoint through the store, without running any code of its pickles."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from stepkeeper.checkpoint.reread import read_if_present
from stepkeeper.errors import BadItem, RestoreError, TornCheckpointError
from stepkeeper.log.foreign_steps import METADATA
from stepkeeper.restore.foreign.archive import HeldArchive
from stepkeeper.storage import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.errors import (
    MetadataDecodeError,
    PickleRefusedError,
    UnknownNameError,
    ValueDecodeError,
)
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.loading.stored_state import StoredTensor, read_key_paths
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata
from stepkeeper_planners.pickles.torch_files import load_archive
from stepkeeper_planners.state.values import decode_value

__all__ = ["ForeignContent", "open_content"]

_INSTEAD: Final = "load it with torch.distributed.checkpoint's dcp.load and save it again"

_Key = tuple[str, tuple[int, ...] | None]
"""A name, and the offsets of the chunk in the tensor; None instead of offsets for a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place of one tensor file or value."""

    path: str
    offset_bytes: int
    length_bytes: int
    unread: str | None = None
    """A description of its kind, if that is one that isn't read here."""


@final
class ForeignContent:
    """The tensors and values of one checkpoint, by name. Many threads may read at once."""

    def __init__(self, store: Store, folder: str, metadata: Metadata, patience: Patience) -> None:
        self._store, self._folder, self._patience = store, folder, patience
        self._places = dict(_places(metadata, f"{store.uri}/{folder}/{METADATA}"))
        entries = metadata.state_dict_metadata
        self.key_paths = read_key_paths(metadata)
        self.tensors: Mapping[str, StoredTensor] = {
            fqn: _stored(entry) for fqn, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.values = tuple(fqn for fqn, entry in entries.items() if isinstance(entry, BytesStorageMetadata))

    def find_lacking(self, sizes: Mapping[str, int]) -> str | None:
        """Find an object that is missing or too short; None if none is. `sizes` are those of the folder's objects."""
        for place in self._places.values():
            size_bytes = sizes.get(place.path)
            if size_bytes is None:
                return f"{place.path} is missing"
            if size_bytes < place.offset_bytes + place.length_bytes:
                return f"{place.path} is cut short: {size_bytes} bytes"
        return None

    def check_kinds(self, chunks: Iterable[tuple[str, int]], values: Iterable[str]) -> None:
        """Check by `.metadata` that all of these are of a kind that is read here.

        Raises RestoreError, which names one that isn't.
        """
        places = [(fqn, self._places[fqn, self.tensors[fqn].boxes[number].offsets]) for fqn, number in chunks]
        for name, place in (*places, *((name, self._places[name, None]) for name in values)):
            if place.unread is not None:
                raise RestoreError(self._unread(name, place.unread))

    def read_chunk(self, fqn: str, number: int) -> torch.Tensor:
        """Read a stored chunk of a tensor into CPU memory.

        Raises:
            TornCheckpointError: Its bytes aren't what was written, by the checksums in the tensor file or by
                its form.
            RestoreError: They are, and the chunk is of a kind that isn't read here.

        """
        stored = self.tensors[fqn]
        box = stored.boxes[number]
        item = BadItem(folder=self._folder, name=fqn, chunk=number)
        archive = self._archive(self._places[fqn, box.offsets], item)
        try:
            tensor = load_archive(archive)
        except PickleRefusedError as error:
            # The checksums of its records are right: it was written like this.
            raise RestoreError(self._unread(fqn, str(error))) from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != box.sizes:
            raise self._torn(item, f"it isn't the chunk of shape {box.sizes} that {METADATA} says it is")
        if dtype_name(tensor.dtype) != stored.dtype:
            raise self._torn(item, f"it is of {dtype_name(tensor.dtype)}, {METADATA} says {stored.dtype}")
        return tensor.detach()

    def read_value(self, name: str) -> object:
        """Read a value.

        Raises TornCheckpointError as `read_chunk` does, and ValueDecodeError if its type isn't one that is
        read.
        """
        archive = self._archive(self._places[name, None], BadItem(folder=self._folder, name=name))
        try:
            return decode_value(name, archive.data)
        except ValueDecodeError as error:
            raise ValueDecodeError(self._unread(name, str(error))) from error

    def _unread(self, name: str, said: str) -> str:
        return (
            f"{self._store.uri}/{self._folder}: {name} can't be read by stepkeeper: {said}. Nothing is wrong with the "
            f"checkpoint: leave it out with exclude=[{name!r}], or {_INSTEAD}"
        )

    def _archive(self, place: _Place, item: BadItem) -> HeldArchive:
        try:
            archive = HeldArchive(self._bytes(place, item))
            damage = archive.find_damage()
        except PickleRefusedError as error:
            damage = str(error)
        if damage is not None:
            raise self._torn(item, f"at byte {place.offset_bytes} of {place.path}: {damage}")
        return archive

    def _bytes(self, place: _Place, item: BadItem) -> bytes:
        path = f"{self._folder}/{place.path}"
        data = self._patience.retry(
            lambda: read_if_present(self._store, path, place.offset_bytes, place.length_bytes)
        )
        if data is None:
            raise self._torn(item, f"{place.path} is missing")
        if len(data) != place.length_bytes:
            raise self._torn(item, f"{place.path} is cut short")
        return data

    def _torn(self, item: BadItem, said: str) -> TornCheckpointError:
        return TornCheckpointError(f"{self._store.uri}/{self._folder}: {item.name}: {said}", item)


def open_content(store: Store, folder: str, *, patience: Patience = DEFAULT_PATIENCE) -> ForeignContent:
    """Read what the folder's `.metadata` says is there.

    Raises:
        TornCheckpointError: It is missing, damaged, or contradicts itself.
        RestoreError: It, or all of its data, is of a kind that isn't read here.
        StorageError: The store gave no answer, or refused.

    """
    path = f"{folder}/{METADATA}"
    data = patience.retry(lambda: read_if_present(store, path))
    item = BadItem(folder=folder, name=METADATA)
    if data is None:
        raise TornCheckpointError(f"{store.uri}/{path} is missing", item)
    try:
        metadata = read_metadata(data, name=f"{store.uri}/{path}")
        check_metadata(metadata, name=f"{store.uri}/{path}")
    except MetadataDecodeError as error:
        if isinstance(error.__cause__, UnknownNameError):
            raise RestoreError(
                f"{store.uri}/{path} can't be read by stepkeeper: {error.__cause__}. Unless it is damaged, "
                f"{_INSTEAD} without that; else take {folder} away"
            ) from error
        raise TornCheckpointError(str(error), item) from error
    return ForeignContent(store, folder, metadata, patience)


def _places(metadata: Metadata, where: str) -> Iterator[tuple[_Key, _Place]]:
    storage = metadata.storage_data
    if not isinstance(storage, Mapping):
        raise RestoreError(
            f"{where} doesn't say in which files things are: convert it with its own writer's reader"
        )
    n_bytes = dict(_sizes(metadata))
    for index, info in storage.items():
        if not isinstance(index, MetadataIndex) or not hasattr(info, "relative_path"):
            raise RestoreError(
                f"{where} is of a writer that keeps its data otherwise than torch's FileSystemWriter"
            )
        offsets = None if index.offset is None else tuple(index.offset)
        place = _Place(
            path=info.relative_path,
            offset_bytes=info.offset,
            length_bytes=info.length,
            unread=_kind_unread(info, n_bytes.get((index.fqn, offsets))),
        )
        yield (index.fqn, offsets), place


def _sizes(metadata: Metadata) -> Iterator[tuple[_Key, int]]:
    """Compute the size of each chunk's elements, in bytes."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            itemsize = entry.properties.dtype.itemsize
            for chunk in entry.chunks:
                yield (fqn, tuple(chunk.offsets)), prod(chunk.sizes) * itemsize


def _kind_unread(info: Any, n_bytes: int | None) -> str | None:
    """Describe a stored tensor or value that is not as torch.save writes it; None if it is.

    `n_bytes` is the size of a tensor's elements.
    """
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        return f"it was stored compressed or otherwise changed ({transforms})"
    if n_bytes is not None and info.length <= n_bytes:
        # An archive of torch.save is longer than the elements in it.
        return f"its {info.length} bytes are no archive of torch.save's (of safetensors, perhaps)"
    return None


def _stored(entry: Any) -> StoredTensor:
    return StoredTensor(
        dtype=dtype_name(entry.properties.dtype),
        global_shape=tuple(entry.size),
        boxes=tuple(Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in entry.chunks),
    )
