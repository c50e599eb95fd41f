"""Read another writer's checkpoint through the store, without running any code of its pickles."""

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, final

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from typing_extensions import override

from stepkeeper.checkpoint.blocks import Block, BlockTable, Contents
from stepkeeper.checkpoint.inventory import ChunkRecord, TensorRecord, ValueRecord
from stepkeeper.checkpoint.manifest import Shardings
from stepkeeper.checkpoint.reread import read_if_present
from stepkeeper.errors import BadItem, RestoreError, TornCheckpointError
from stepkeeper.log.foreign_steps import METADATA
from stepkeeper.restore.filling import STREAMS
from stepkeeper.restore.placing import stored_tensor
from stepkeeper.storage import Store
from stepkeeper.storage.base import Buffer
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.errors import (
    MetadataDecodeError,
    PickleRefusedError,
    UnknownNameError,
    ValueDecodeError,
)
from stepkeeper_planners.flat_names import find_flat_names
from stepkeeper_planners.loading.stored_state import StoredState, read_key_paths
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata
from stepkeeper_planners.pickles.torch_archive import TorchArchive
from stepkeeper_planners.pickles.torch_files import load_archive
from stepkeeper_planners.state.values import decode_value

__all__ = ["ForeignContent", "decode_content", "open_content", "read_metadata_bytes"]

_COPIES: Final = 3
"""The copies of a chunk in memory while it is read: from the store, out of its archive, in place."""

_MEMORY_BYTES: Final = 1 << 30
"""The host memory for chunks that are read at once. A checkpoint with a larger one is read chunk by chunk."""

_INSTEAD: Final = "load it with torch.distributed.checkpoint's dcp.load and save it again"

_Key = tuple[str, tuple[int, ...] | None]
"""A name, and the offsets of the chunk in the tensor; None instead of offsets for a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place of one tensor file or value."""

    path: str
    offset_bytes: int
    length_bytes: int
    unsupported: str | None = None
    """A description of its kind, if that can't be read here."""


@final
class _HeldArchive(TorchArchive):
    """An archive in memory. Many threads may check many archives at once: checksums are computed without the GIL."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        super().__init__(io.BytesIO(data), len(data))

    def find_damage(self) -> str | None:
        """Find damage in the archive by the checksums of its records; None if there is none."""
        for path in sorted(self.names):
            name = path.removeprefix(self.root)
            try:
                held = self.record(name)
            except PickleRefusedError as error:
                return str(error)
            if isal_zlib.crc32(held) != self.entry(name).CRC:
                return f"record {path} has the wrong checksum"
        return None

    @override
    def record(self, name: str) -> memoryview:
        """Return the bytes of a record, which find_damage() checks."""
        start, n_bytes = self.locate_record(name)
        return memoryview(self.data)[start : start + n_bytes]


@final
class ForeignContent:
    """The tensors and values of one checkpoint, by name. Many threads may read at once.

    Each chunk and each value is one block: only whole ones can be checked.
    """

    def __init__(self, store: Store, folder: str, metadata: Metadata, patience: Patience) -> None:
        self._store, self._folder, self._patience = store, folder, patience
        self._places = dict(_places(metadata, f"{store.uri}/{folder}/{METADATA}"))
        self._items: list[tuple[str, int | None]] = []
        """For each block, by number: a name, and the number of the chunk of that tensor; None for a value."""

        tensors: dict[str, TensorRecord] = {}
        values: dict[str, ValueRecord] = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                # An empty one gets a byte, so that it is read, and found damaged.
                path, n_bytes = str(len(self._items)), max(1, self._places[fqn, None].length_bytes)
                values[fqn] = ValueRecord(fqn=fqn, path=path, offset_bytes=0, length_bytes=n_bytes)
                self._items.append((fqn, None))
            else:
                tensors[fqn] = _record(fqn, entry, len(self._items))
                self._items += ((fqn, number) for number in range(len(entry.chunks)))
        sizes = [chunk.length_bytes for tensor in tensors.values() for chunk in tensor.chunks]
        self.n_streams = max(1, min(STREAMS, _MEMORY_BYTES // (_COPIES * max([1, *sizes]))))
        self.contents = Contents(
            tensors=tensors,
            values=values,
            shardings=Shardings(),
            table=self._number_blocks(tensors, values),
            reading_order=range(len(self._items)),
        )
        self.stored = StoredState(
            # Without `data`, which would prove that two names are two tensors: one may have been stored twice.
            tensors={fqn: stored_tensor(tensor)._replace(data=None) for fqn, tensor in tensors.items()},
            values=tuple(values),
            further=find_flat_names(metadata.planner_data, metadata.state_dict_metadata),
            read_paths=lambda: read_key_paths(metadata),
        )

    def _number_blocks(
        self, tensors: Mapping[str, TensorRecord], values: Mapping[str, ValueRecord]
    ) -> BlockTable:
        sizes = [
            values[name].length_bytes if chunk is None else tensors[name].chunks[chunk].length_bytes
            for name, chunk in self._items
        ]
        blocks = tuple(
            Block(number=number, path=str(number), index=0, size_bytes=size_bytes)
            for number, size_bytes in enumerate(sizes)
        )
        return BlockTable(
            blocks=blocks, first_numbers={each.path: each.number for each in blocks}, one_block_each=True
        )

    def find_chunks(self) -> dict[tuple[str, int], ChunkRecord]:
        """Find the content of each file: the chunks by the file's path and by where in it they begin."""
        tensors = self.contents.tensors.values()
        places = ((self._places[each.fqn, chunk.offsets], chunk) for each in tensors for chunk in each.chunks)
        return {(place.path, place.offset_bytes): chunk for place, chunk in places}

    def find_lacking(self, sizes: Mapping[str, int]) -> str | None:
        """Find an object that is missing or too short; None if none is. `sizes` are those of the folder's objects."""
        for place in self._places.values():
            size_bytes = sizes.get(place.path)
            if size_bytes is None:
                return f"{place.path} is missing"
            if size_bytes < place.offset_bytes + place.length_bytes:
                return f"{place.path} is cut short: {size_bytes} bytes"
        return None

    def check_kinds(self, numbers: Iterable[int]) -> None:
        """Check by `.metadata` that all of these blocks are of a supported kind. Raises RestoreError."""
        for name, chunk in map(self._items.__getitem__, numbers):
            place = self._place(name, chunk)
            if place.unsupported is not None:
                raise RestoreError(self._describe_unsupported(name, place.unsupported))

    def read_block(self, path: str, _block: int, /) -> Buffer:
        """Read the elements of a chunk, or a value's archive. Raises what `read_chunk` does."""
        name, chunk = self._items[int(path)]
        if chunk is None:
            return self._archive(name, None).data
        elements = self.read_chunk(name, chunk).resolve_conj().resolve_neg().contiguous()
        data: memoryview = elements.reshape(-1).view(torch.uint8).numpy().data
        return data

    def read_chunk(self, fqn: str, number: int) -> torch.Tensor:
        """Read a stored chunk of a tensor into CPU memory.

        Raises TornCheckpointError if its bytes aren't as written, by the tensor file's checksums or its form;
        RestoreError if they are, but the chunk is of an unsupported kind.
        """
        stored = self.contents.tensors[fqn]
        sizes = stored.chunks[number].sizes
        try:
            tensor = load_archive(self._archive(fqn, number))
        except PickleRefusedError as error:
            # The checksums of its records are right: it was written like this.
            raise RestoreError(self._describe_unsupported(fqn, str(error))) from error
        item = BadItem(folder=self._folder, name=fqn, chunk=number)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes:
            raise self._torn(item, f"it isn't the chunk of shape {sizes} that {METADATA} lists")
        if dtype_name(tensor.dtype) != stored.dtype:
            raise self._torn(
                item, f"it has dtype {dtype_name(tensor.dtype)}, but {METADATA} lists {stored.dtype}"
            )
        return tensor.detach()

    def read_value(self, name: str) -> object:
        """Read a value. Raises what `decode_value` does, and TornCheckpointError as `read_chunk`."""
        return self.decode_value(name, self._archive(name, None).data)

    def decode_value(self, name: str, data: bytes) -> object:
        """Decode a value that was read. Raises ValueDecodeError if its type isn't supported."""
        try:
            return decode_value(name, data)
        except ValueDecodeError as error:
            raise ValueDecodeError(self._describe_unsupported(name, str(error))) from error

    def _describe_unsupported(self, name: str, reason: str) -> str:
        return (
            f"{self._store.uri}/{self._folder}: {name} can't be read by stepkeeper: {reason}. Nothing is wrong with "
            f"the checkpoint: leave it out with exclude=[{name!r}], or {_INSTEAD}"
        )

    def _place(self, name: str, chunk: int | None) -> _Place:
        offsets = None if chunk is None else self.contents.tensors[name].chunks[chunk].offsets
        return self._places[name, offsets]

    def _archive(self, name: str, chunk: int | None) -> _HeldArchive:
        """Read one of torch.save's archives, and check it. Raises TornCheckpointError."""
        place, item = self._place(name, chunk), BadItem(folder=self._folder, name=name, chunk=chunk)
        path = f"{self._folder}/{place.path}"
        data = self._patience.retry(
            lambda: read_if_present(self._store, path, place.offset_bytes, place.length_bytes)
        )
        if data is None:
            raise self._torn(item, f"{place.path} is missing")
        if len(data) != place.length_bytes:
            raise self._torn(item, f"{place.path} is cut short")
        try:
            archive = _HeldArchive(data)
            damage = archive.find_damage()
        except PickleRefusedError as error:
            damage = str(error)
        if damage is not None:
            raise self._torn(item, f"at byte {place.offset_bytes} of {place.path}: {damage}")
        return archive

    def _torn(self, item: BadItem, fault: str) -> TornCheckpointError:
        return TornCheckpointError(f"{self._store.uri}/{self._folder}: {item.name}: {fault}", item)


def open_content(store: Store, folder: str, *, patience: Patience = DEFAULT_PATIENCE) -> ForeignContent:
    """Read the content that the folder's `.metadata` lists.

    Raises TornCheckpointError if that is missing, damaged, or contradicts itself; RestoreError if it, or all
    of its data, is of an unsupported kind; StorageError.
    """
    return decode_content(store, folder, read_metadata_bytes(store, folder, patience), patience)


def read_metadata_bytes(store: Store, folder: str, patience: Patience = DEFAULT_PATIENCE) -> bytes:
    """Read the folder's `.metadata` as it is stored. Raises TornCheckpointError if it is missing, or StorageError."""
    path = f"{folder}/{METADATA}"
    data = patience.retry(lambda: read_if_present(store, path))
    if data is None:
        raise TornCheckpointError(f"{store.uri}/{path} is missing", BadItem(folder=folder, name=METADATA))
    return data


def decode_content(
    store: Store, folder: str, data: bytes, patience: Patience = DEFAULT_PATIENCE
) -> ForeignContent:
    """Decode the folder's `.metadata`. Raises TornCheckpointError or RestoreError, as `open_content`."""
    name = f"{store.uri}/{folder}/{METADATA}"
    try:
        metadata = read_metadata(data, name=name)
        check_metadata(metadata, name=name)
    except MetadataDecodeError as error:
        if isinstance(error.__cause__, UnknownNameError):
            raise RestoreError(
                f"{name} can't be read by stepkeeper: {error.__cause__}. Unless it is damaged, "
                f"{_INSTEAD} without that; otherwise remove {folder}"
            ) from error
        raise TornCheckpointError(str(error), BadItem(folder=folder, name=METADATA)) from error
    return ForeignContent(store, folder, metadata, patience)


def _places(metadata: Metadata, where: str) -> Iterator[tuple[_Key, _Place]]:
    storage = metadata.storage_data
    if not isinstance(storage, Mapping):
        raise RestoreError(
            f"{where} doesn't list the files of its data: convert it with its own writer's reader"
        )
    n_bytes = dict(_sizes(metadata))
    for index, info in storage.items():
        if not isinstance(index, MetadataIndex) or not hasattr(info, "relative_path"):
            raise RestoreError(
                f"{where} is from a writer that stores its data differently from torch's FileSystemWriter"
            )
        offsets = None if index.offset is None else tuple(index.offset)
        place = _Place(
            path=info.relative_path,
            offset_bytes=info.offset,
            length_bytes=info.length,
            unsupported=_find_unsupported_kind(info, n_bytes.get((index.fqn, offsets))),
        )
        yield (index.fqn, offsets), place


def _sizes(metadata: Metadata) -> Iterator[tuple[_Key, int]]:
    """Compute the size of each chunk's elements, in bytes."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            itemsize = entry.properties.dtype.itemsize
            for chunk in entry.chunks:
                yield (fqn, tuple(chunk.offsets)), prod(chunk.sizes) * itemsize


def _find_unsupported_kind(info: Any, n_bytes: int | None) -> str | None:
    """Describe a stored tensor, of `n_bytes`, or value that is not as torch.save writes it; None if it is."""
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        return f"it was stored compressed or otherwise changed ({transforms})"
    if n_bytes is not None and info.length <= n_bytes:
        # An archive of torch.save is longer than the elements in it.
        return f"its {info.length} bytes aren't a torch.save archive (safetensors, perhaps)"
    return None


def _record(fqn: str, entry: TensorStorageMetadata, first: int) -> TensorRecord:
    """Describe a tensor whose chunks are the blocks from number `first` on."""
    chunks = [
        ChunkRecord(
            offsets=tuple(chunk.offsets),
            sizes=tuple(chunk.sizes),
            path=str(first + place),
            offset_bytes=0,
            length_bytes=prod(chunk.sizes) * entry.properties.dtype.itemsize,
            data_offset_bytes=0,
        )
        for place, chunk in enumerate(entry.chunks)
    ]
    return TensorRecord(
        fqn=fqn,
        dtype=dtype_name(entry.properties.dtype),
        global_shape=tuple(entry.size),
        chunks=tuple(chunks),
    )
