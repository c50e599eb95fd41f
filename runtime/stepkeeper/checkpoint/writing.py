"""Write one rank's objects of a checkpoint."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from stepkeeper.checkpoint.file_parts import FileParts, RankData
from stepkeeper.checkpoint.inventory import Inventory
from stepkeeper.checkpoint.layout_cache import LayoutCache, lay_out
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, ObjectRecord, Shardings, manifest_name
from stepkeeper.checkpoint.orders import SaveOrder
from stepkeeper.checkpoint.packing import File, pack_order
from stepkeeper.storage.base import Buffer, Store, StreamedStore, joined_size_bytes
from stepkeeper.storage.crc import block_crcs
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "RankData",
    "build_manifest",
    "build_object_record",
    "plan_files",
    "write_checkpoint",
    "write_files",
    "write_object",
]

_STREAMS: Final = 8
_DIGESTING: Final = threading.Semaphore(2)
"""Checksums use the CPU, mostly under the GIL. If all objects were digested at the same time, none would be
uploading meanwhile.
"""

_LEAST_BYTES: Final = 16 * 1024 * 1024
_LEAST_STREAMED_BYTES: Final = 4 * 1024 * 1024
"""Minimum size of an object in a store that limits the bandwidth of each upload. A smaller upload takes as long as
the request itself.
"""


def plan_files(store: Store, order: SaveOrder) -> tuple[File, ...]:
    """Plan the objects for a rank's share in this store."""
    streams, least_bytes = _choose_streams(store)
    return pack_order(order, streams=streams, least_bytes=least_bytes)


def write_files(
    store: Store, folder: str, files: Sequence[File], data: RankData, *, patience: Patience
) -> tuple[ObjectRecord, ...]:
    """Write the files into the folder durably, as many in parallel as the store allows. Raises StorageError."""
    with ThreadPoolExecutor(_choose_streams(store)[0], thread_name_prefix="stepkeeper-write") as pool:
        return tuple(pool.map(lambda file: _write_file(store, folder, file, data, patience), files))


def write_checkpoint(
    store: Store,
    order: SaveOrder,
    data: RankData,
    *,
    cache: LayoutCache | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> Manifest:
    """Write one rank's objects and its manifest durably. Raises StorageError.

    Rank 0's manifest is written later, by `finish_checkpoint`: it lists all others.
    """
    streams, least_bytes = _choose_streams(store)
    layout = (lay_out if cache is None else cache.get_layout)(order, streams=streams, least_bytes=least_bytes)
    objects = write_files(store, order.folder, layout.files, data, patience=patience)
    manifest = build_manifest(order, layout.inventory, objects)
    if order.rank != 0:
        write_object(store, order.folder, manifest_name(order.rank), [manifest.to_json()], patience)
    return manifest


def build_manifest(order: SaveOrder, inventory: Inventory, objects: Sequence[ObjectRecord]) -> Manifest:
    """Build the manifest of a rank that wrote these objects."""
    return Manifest(
        rank=order.rank,
        world_size=order.world_size,
        step=order.step,
        claim=order.claim,
        nonce=order.nonce,
        objects=tuple(objects),
        inventory=inventory,
        aliases=dict(order.structure.aliases),
        # They are the same on all ranks.
        shardings=order.structure.shardings if order.rank == 0 else Shardings(),
    )


def _choose_streams(store: Store) -> tuple[int, int]:
    """Return how many objects to write in parallel, and the minimum size of each."""
    if isinstance(store, StreamedStore):
        return store.streams, _LEAST_STREAMED_BYTES
    return _STREAMS, _LEAST_BYTES


def _write_file(store: Store, folder: str, file: File, data: RankData, patience: Patience) -> ObjectRecord:
    with _DIGESTING:
        parts = FileParts(file, data)
        record = build_object_record(file.name, parts)
    patience.retry(lambda: store.write(f"{folder}/{file.name}", parts))
    return record


def write_object(
    store: Store, folder: str, name: str, parts: Sequence[Buffer], patience: Patience
) -> ObjectRecord:
    """Write an object durably, and return its record. Raises StorageError."""
    record = build_object_record(name, parts)
    patience.retry(lambda: store.write(f"{folder}/{name}", parts))
    return record


def build_object_record(name: str, parts: Sequence[Buffer]) -> ObjectRecord:
    """Build the record of an object that has these parts."""
    return ObjectRecord(path=name, size_bytes=joined_size_bytes(parts), blocks=block_crcs(parts, BLOCK_BYTES))
