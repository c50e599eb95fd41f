"""Try a store: its permissions, and whether one of many creates wins."""

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
