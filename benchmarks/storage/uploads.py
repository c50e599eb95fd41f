"""Ways to send bulk data to a bucket, and to read it: each with its seconds for so many bytes."""

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from google.cloud.storage import transfer_manager

from stepkeeper.storage.gcs import GcsStore

__all__ = ["READS", "UPLOADS", "Bulk", "seconds_of"]

MIB: Final = 1024 * 1024
_PART_BYTES: Final = 32 * MIB


class Bulk:
    """Some bytes to send, in memory and in a file, and the bucket where they go."""

    def __init__(self, store: GcsStore, folder: Path, size_bytes: int, streams: int) -> None:
        self.store = store
        self.streams = streams
        self.data = secrets.token_bytes(MIB) * (size_bytes // MIB)
        self.file = folder / "bulk"
        self.file.write_bytes(self.data)

    def blob(self, name: str) -> Any:
        return self.store._bucket.blob(f"{self.store._prefix}{name}")  # noqa: SLF001  # ways that it doesn't use

    def name(self) -> str:
        return f"bulk/{secrets.token_hex(8)}"


def _as_the_writer_does(bulk: Bulk) -> None:
    """One object for each stream, all at once."""
    view, share = memoryview(bulk.data), len(bulk.data) // bulk.streams
    names = [bulk.name() for _ in range(bulk.streams)]
    with ThreadPoolExecutor(bulk.streams) as pool:
        list(
            pool.map(
                lambda n: bulk.store.write(names[n], [view[n * share : (n + 1) * share]]),
                range(bulk.streams),
            )
        )


def _one_object(bulk: Bulk) -> None:
    bulk.store.write(bulk.name(), [bulk.data])


def _one_request(bulk: Bulk) -> None:
    """A resumable upload in a single piece."""
    blob = bulk.blob(bulk.name())
    blob.chunk_size = len(bulk.data)
    blob.upload_from_filename(bulk.file, checksum=None, if_generation_match=0)


def _small_pieces(bulk: Bulk) -> None:
    blob = bulk.blob(bulk.name())
    blob.chunk_size = 8 * MIB
    blob.upload_from_filename(bulk.file, checksum=None, if_generation_match=0)


def _multipart(bulk: Bulk) -> None:
    """The XML API's parts, sent side by side: one object, but no precondition and no checksum of the whole."""
    transfer_manager.upload_chunks_concurrently(
        str(bulk.file),
        bulk.blob(bulk.name()),
        chunk_size=_PART_BYTES,
        max_workers=bulk.streams,
        worker_type=transfer_manager.THREAD,
        checksum=None,
    )


def _composed(bulk: Bulk) -> None:
    """Parts as objects, sent side by side, then put together by the server."""
    view, share = memoryview(bulk.data), len(bulk.data) // bulk.streams
    names = [bulk.name() for _ in range(bulk.streams)]
    with ThreadPoolExecutor(bulk.streams) as pool:
        list(
            pool.map(
                lambda n: bulk.store.write(names[n], [view[n * share : (n + 1) * share]]),
                range(bulk.streams),
            )
        )
    bulk.blob(bulk.name()).compose([bulk.blob(name) for name in names])
    for name in names:
        bulk.store.delete(name)


UPLOADS: Final[Mapping[str, Callable[[Bulk], None]]] = {
    "objects side by side (the writer)": _as_the_writer_does,
    "one object (GcsStore.write)": _one_object,
    "one object, one request": _one_request,
    "one object, pieces of 8 MiB": _small_pieces,
    "one object, XML multipart side by side": _multipart,
    "parts side by side, composed": _composed,
}


def _whole(bulk: Bulk, name: str) -> int:
    return len(bulk.store.read(name))


def _ranges(bulk: Bulk, name: str) -> int:
    share = len(bulk.data) // bulk.streams
    with ThreadPoolExecutor(bulk.streams) as pool:
        return sum(map(len, pool.map(lambda n: bulk.store.read(name, n * share, share), range(bulk.streams))))


READS: Final[Mapping[str, Callable[[Bulk, str], int]]] = {
    "one read": _whole,
    "ranges side by side": _ranges,
}


def seconds_of(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s
