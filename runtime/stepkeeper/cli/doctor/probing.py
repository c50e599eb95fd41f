"""Try a store: its permissions, whether one of many creates wins, and how fast it is."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from stepkeeper.cli.doctor.bucket import Finding
from stepkeeper.errors import (
    LogGapError,
    MissingObjectError,
    NotExclusiveError,
    StorageError,
    TransientStorageError,
)
from stepkeeper.log.entries import new_nonce
from stepkeeper.log.tail import find_tail
from stepkeeper.quantities import size_text
from stepkeeper.storage import Store
from stepkeeper.storage.base import PROBE_PREFIX
from stepkeeper.storage.exclusive_create import prove_exclusive_create
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["measure_throughput", "probe_store"]

_THREADS: Final = 8
_OBJECT_BYTES: Final = 64 * 1024 * 1024
_EXCLUSIVE: Final = (
    "no log can live here: use gs://, an s3:// with conditional writes, or a folder on one file system"
)


def probe_store(store: Store, patience: Patience) -> list[Finding]:
    """Put, read, list and delete a probe object, which is gone afterwards if it can be deleted.

    Returns:
        One finding for each operation.

    Raises:
        TransientStorageError: The store gave no answer, which is no finding.

    """
    path = f"{_prefix(store, patience)}{new_nonce()}"
    findings: list[Finding] = []

    def record_try(check: str, todo: str, operation: Callable[[], str | None]) -> bool:
        try:
            complaint = patience.retry(operation)
        except TransientStorageError:
            raise
        except NotExclusiveError as error:
            # Some stores try this themselves before they put anything.
            check, todo, complaint = "conditional-write", _EXCLUSIVE, " ".join(str(error).split())
        except StorageError as error:
            complaint = " ".join(str(error).split())
        if complaint is None:
            findings.append(Finding(check=check, verdict="ok", says="works"))
        else:
            findings.append(Finding(check=check, verdict="bad", says=complaint, todo=todo))
        return complaint is None

    role = "on a bucket grant roles/storage.objectUser; of a folder let the job's user be the owner"
    if not record_try("put", role, lambda: _try_put(store, path)):
        return findings
    try:
        record_try(
            "read", role, lambda: None if store.read(path) == b"0" else "it reads other bytes than were put"
        )
        record_try("list", "caches of listings must be off", lambda: _try_list(store, path))
        record_try("conditional-write", _EXCLUSIVE, lambda: _try_racing_creates(store, patience))
    finally:
        record_try("delete", role, lambda: _try_delete(store, path))
    return findings


def _prefix(store: Store, patience: Patience) -> str:
    """Return a prefix for probe objects that contains the log's next slot.

    A later start that has claimed the root deletes what a killed command left there.
    """
    try:
        next_slot = find_tail(store, patience) + 1
    except TransientStorageError:
        raise
    except (StorageError, LogGapError):
        # Other checks report this error, and no start claims the root before it is mended.
        next_slot = 0
    return f"{PROBE_PREFIX}{next_slot:08d}-"


def _try_put(store: Store, path: str) -> str | None:
    # False is no loss: a first try had gone through without an answer, and nobody else knows the name.
    store.put_if_absent(path, b"0")
    return None


def _try_list(store: Store, path: str) -> str | None:
    found = any(stat.path == path for stat in store.list(path))
    return None if found else "an object that was just put isn't listed"


def _try_racing_creates(store: Store, patience: Patience) -> str | None:
    prove_exclusive_create(store, store.put_if_absent, patience)
    return None


def _try_delete(store: Store, path: str) -> str | None:
    store.delete(path)
    try:
        store.read(path)
    except MissingObjectError:
        return None
    return f"{path} is there after it was deleted"


def measure_throughput(store: Store, size_bytes: int) -> Finding:
    """Measure how fast this host writes and reads objects, several at a time. The objects are gone afterwards.

    Args:
        store: The root's store.
        size_bytes: Number of bytes to write and read.

    """
    each_bytes = min(_OBJECT_BYTES, -(-size_bytes // _THREADS))
    n_objects = -(-size_bytes // each_bytes)
    # Random bytes: no file system and no proxy can compress them.
    data = os.urandom(each_bytes)
    prefix = _prefix(store, DEFAULT_PATIENCE)
    paths = [f"{prefix}{new_nonce()}" for _ in range(n_objects)]
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            write_s = _timed(lambda: list(pool.map(lambda path: store.write(path, [data]), paths)))
            read_s = _timed(lambda: list(pool.map(lambda path: len(store.read(path)), paths)))
        finally:
            list(pool.map(partial(store.delete), paths))
    total_bytes = n_objects * each_bytes
    return Finding(
        check="throughput",
        verdict="ok",
        says=f"{size_text(total_bytes)} in {n_objects} objects, {_THREADS} at a time: written durably at "
        f"{size_text(int(total_bytes / write_s))}/s, read at {size_text(int(total_bytes / read_s))}/s",
        todo="reading may come from this host's memory; compare with what a checkpoint's bytes per host need",
    )


def _timed(operation: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    operation()
    return max(time.perf_counter() - start_s, 1e-9)
