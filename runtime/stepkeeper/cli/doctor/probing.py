"""Probe a store: its permissions, and whether exactly one of many creates wins."""

from collections.abc import Callable
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
from stepkeeper.storage import Store
from stepkeeper.storage.base import PROBE_PREFIX
from stepkeeper.storage.exclusive_create import prove_exclusive_create
from stepkeeper.storage.retry import Patience

__all__ = ["probe_store"]

_EXCLUSIVE: Final = (
    "this store can't hold a log: use gs://, an s3:// with conditional writes, or a folder on one file system"
)


def probe_store(store: Store, patience: Patience) -> list[Finding]:
    """Put, read, list and delete a probe object, and return a finding for each operation.

    It is gone afterwards if it can be deleted. A store that doesn't answer is no finding, but raises.
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
            findings.append(Finding(check=check, verdict="ok", summary="works"))
        else:
            findings.append(Finding(check=check, verdict="bad", summary=complaint, todo=todo))
        return complaint is None

    role = "for a bucket, grant roles/storage.objectUser; for a folder, make the job's user its owner"
    if not record_try("put", role, lambda: _try_put(store, path)):
        return findings
    try:
        record_try(
            "read",
            role,
            lambda: None if store.read(path) == b"0" else "the bytes read differ from those written",
        )
        record_try("list", "turn off caching of listings", lambda: _try_list(store, path))
        record_try("conditional-write", _EXCLUSIVE, lambda: _try_racing_creates(store, patience))
    finally:
        record_try("delete", role, lambda: _try_delete(store, path))
    return findings


def _prefix(store: Store, patience: Patience) -> str:
    """Return a prefix for probe objects, with the log's next slot: by it a later start deletes leftovers."""
    try:
        next_slot = find_tail(store, patience) + 1
    except TransientStorageError:
        raise
    except (StorageError, LogGapError):
        # Other checks report this error, and no start claims the root before it is repaired.
        next_slot = 0
    return f"{PROBE_PREFIX}{next_slot:08d}-"


def _try_put(store: Store, path: str) -> str | None:
    # False is no conflict: an earlier try succeeded without an answer, and no other process knows the name.
    store.put_if_absent(path, b"0")
    return None


def _try_list(store: Store, path: str) -> str | None:
    found = any(stat.path == path for stat in store.list(path))
    return None if found else "an object that was just written isn't listed"


def _try_racing_creates(store: Store, patience: Patience) -> str | None:
    prove_exclusive_create(store, store.put_if_absent, patience)
    return None


def _try_delete(store: Store, path: str) -> str | None:
    store.delete(path)
    try:
        store.read(path)
    except MissingObjectError:
        return None
    return f"{path} still exists after its deletion"
