"""Prove, before a root is claimed, that all ranks see one root, and that only one of two writers of a name succeeds."""

import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import (
    MissingObjectError,
    NotExclusiveError,
    StepkeeperError,
    StorageError,
    TransientStorageError,
    UnsharedRootError,
    decode_error,
    encode_error,
)
from stepkeeper.log import Log
from stepkeeper.log.entries import new_nonce
from stepkeeper.log.tail import find_tail
from stepkeeper.loggers import logger
from stepkeeper.retention.garbage import gc
from stepkeeper.storage.base import PROBE_PREFIX, Store, is_full
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["RootProof", "prove_shared"]

_log: Final = logger(__name__)
_NAMED_HOSTS: Final = 8
_SLACK_S: Final = 300.0
"""The time that a rank may take beyond its patience, for hanging requests."""


class RootProof:
    """Call `prove_shared` for one process's store once, before its first claim."""

    def __init__(self, store: Store, ranks: RankGroup) -> None:
        self._store = store
        self._ranks = ranks
        self.made = False
        """True once the proof was made."""

    def make(self) -> None:
        """Call `prove_shared`, unless it has been called. All ranks call this at the same point.

        It uses Python's random numbers and restores their state, so the train thread calls it, or waits for it.
        """
        if self.made:
            return
        # Bucket clients use Python's random numbers (for multipart boundaries); the training's must not change.
        numbers = random.getstate()
        try:
            prove_shared(self._store, self._ranks)
        finally:
            random.setstate(numbers)
        self.made = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """One rank's finding about rank 0's probe object."""

    rank: int
    host: str
    unshared: str | None = None
    """The reason why this isn't the root that rank 0 writes to; None if it is."""

    overwrote: bool = False
    """True if it saw rank 0's object, and could put another one under the same name."""


def prove_shared(
    store: Store, ranks: RankGroup, *, host: str | None = None, patience: Patience = DEFAULT_PATIENCE
) -> None:
    """Prove that all ranks see one root, and that a name in it can be taken only once. Nothing is left there.

    Rank 0 puts a probe object, all ranks look for it, and rank 0 concludes from their findings.

    All ranks call this, and all raise the same error: UnsharedRootError, which names the hosts that see another root
    than rank 0, NotExclusiveError if two writers of one name both succeeded, TransientStorageError if another process
    claimed the root meanwhile, or StorageError if rank 0 may not write, or gets no answer in time.
    """
    own_host = socket.gethostname() if host is None else host
    meet_s, timeout_s = ranks.limits.start_s, patience.total_s + _SLACK_S
    ranks.gather("probe/met", {}, meet_s)
    placed: dict[str, Any] | None = None
    if ranks.rank == 0:
        try:
            placed = {"path": _place_probe_with_room(store, patience), "host": own_host}
        except StepkeeperError as error:
            placed = {"error": encode_error(error)}
    placed = ranks.broadcast("probe/placed", placed, 2 * meet_s)
    if "error" in placed:
        raise decode_error(placed["error"])
    path = str(placed["path"])
    finding = _look_for_probe(store, path, ranks, own_host, patience)
    findings = ranks.gather("probe/found", encode(finding), timeout_s)
    verdict: dict[str, Any] | None = None
    if ranks.rank == 0:
        verdict = _clean_up(store, path, patience, [decode(_Finding, each) for each in findings], own_host)
    verdict = ranks.broadcast("probe/verdict", verdict, timeout_s)
    if "error" in verdict:
        raise decode_error(verdict["error"])


def _place_probe_with_room(store: Store, patience: Patience) -> str:
    """Call `_place_probe`. On a full disk, first delete data that no commit needs."""
    try:
        return _place_probe(store, patience)
    except StorageError as error:
        if not is_full(error):
            raise
        report = gc(Log(store, patience=patience), store, patience=patience)
        freed = sum(each.size_bytes for each in report.collected)
        _log.warning("%s: no space left; deleted %d bytes that no commit needs", store.uri, freed)
    try:
        return _place_probe(store, patience)
    except StorageError as error:
        if not is_full(error):
            raise
        raise StorageError(
            f"{error}. There is no room even for a log entry. Leftovers from before the last start are already "
            "deleted. Free a few kilobytes by hand: the first save of the next start then deletes the last start's "
            f"leftovers. Once it has begun, `stepkeeper gc {store.uri}` deletes them too"
        ) from error


def _place_probe(store: Store, patience: Patience) -> str:
    """Put rank 0's probe object, check that a second put loses, and return its path, which ends with its content."""
    nonce = new_nonce()
    # By the log's next slot, in its name, a later start knows a leftover. `_clean_up` sees whether the slot was taken.
    path = f"{PROBE_PREFIX}{find_tail(store, patience) + 1:08d}-{nonce}"
    # False may be the answer to a retry of a put that succeeded: no other process knows the nonce.
    patience.retry(lambda: store.put_if_absent(path, nonce.encode()))
    if patience.retry(lambda: store.put_if_absent(path, b"second")):
        raise NotExclusiveError(
            f"{store.uri}: two puts under one name both succeeded: no log can work on this store. Put the root on "
            "another store"
        )
    return path


def _look_for_probe(store: Store, path: str, ranks: RankGroup, host: str, patience: Patience) -> _Finding:
    """Look for rank 0's object, until the answer is final or `patience` is over.

    The last rank, which is on another host than rank 0 if there are several, also tries to take the object's name.
    """
    expected = path.rpartition("-")[2].encode()
    asks_to_take = ranks.rank == ranks.world_size - 1 and ranks.rank != 0
    pauses_s = patience.pauses_s()
    unshared: str | None = None
    while True:
        try:
            found = store.read(path)
        except MissingObjectError:
            # If the name is taken, this rank sees the object late. If this rank can take it, it has another root.
            unshared, final = _try_to_take(store, path)
        except TransientStorageError as error:
            unshared, final = f"no answer: {error}", False
        except StorageError as error:
            unshared, final = str(error), True
        else:
            # Other bytes may be an early sight of the object, so they are read again.
            unshared = None if found == expected else f"it has another object there, of {len(found)} bytes"
            final = unshared is None
        if final:
            break
        pause_s = next(pauses_s, None)
        if pause_s is None:
            break
        patience.sleep(pause_s)
    overwrote = unshared is None and asks_to_take and _could_take(store, path)
    return _Finding(rank=ranks.rank, host=host, unshared=unshared, overwrote=overwrote)


def _try_to_take(store: Store, path: str) -> tuple[str, bool]:
    """Return why rank 0's object isn't seen, and whether that is final: a retry would find the same."""
    try:
        if not store.put_if_absent(path, b"another"):
            return "the store doesn't show it yet", False
        store.delete(path)
    except TransientStorageError as error:
        return f"no answer: {error}", False
    except StorageError as error:
        return str(error), True
    return "it has a folder or bucket of its own", True


def _could_take(store: Store, path: str) -> bool:
    """Return whether a put under a taken name succeeded. No answer counts as no."""
    try:
        return store.put_if_absent(path, b"last")
    except StorageError:
        return False


def _clean_up(
    store: Store, path: str, patience: Patience, findings: Sequence[_Finding], host: str
) -> dict[str, Any]:
    """Delete the probe object, and return rank 0's verdict."""
    try:
        patience.retry(lambda: store.delete(path))
        refusal = _verdict(store.uri, findings, host)
        if refusal is None:
            return {}
        if find_tail(store, patience) >= int(path.removeprefix(PROBE_PREFIX).partition("-")[0]):
            refusal = TransientStorageError(
                f"{store.uri}: another process claimed this root during the check that all hosts share it. Start "
                "again if this job should own the root"
            )
        return {"error": encode_error(refusal)}
    except StepkeeperError as error:
        return {"error": encode_error(error)}


def _verdict(uri: str, findings: Sequence[_Finding], host: str) -> StepkeeperError | None:
    """Return the error for which these ranks can't claim `uri`; None if they can. Pure."""
    if any(finding.overwrote for finding in findings):
        return NotExclusiveError(
            f"{uri}: two hosts took one name: no log can work on this store. Put the root on another store"
        )
    by_host: dict[str, list[_Finding]] = {}
    for finding in findings:
        if finding.unshared is not None:
            by_host.setdefault(finding.host, []).append(finding)
    if not by_host:
        return None
    named = []
    for name, found in by_host.items():
        ranks = ", ".join(str(finding.rank) for finding in found[:4]) + (", …" if len(found) > 4 else "")
        named.append(f"{name} (rank {ranks}: {found[0].unshared})")
    more = f" and {len(named) - _NAMED_HOSTS} other hosts" if len(named) > _NAMED_HOSTS else ""
    return UnsharedRootError(
        f"{uri} is not shared by all hosts: the object that {host} (rank 0) wrote is not seen by "
        f"{'; '.join(named[:_NAMED_HOSTS])}{more}. Use a bucket, or a file system that all hosts have mounted there"
    )
