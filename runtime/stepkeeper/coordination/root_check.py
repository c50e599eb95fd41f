"""Proof, before a root is claimed, that all ranks see one root and that of two writers of one name only one wins."""

import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Protocol

from stepkeeper.contract.wire import decode, encode
from stepkeeper.error_codec import decode_error, encode_error
from stepkeeper.errors import (
    MissingObjectError,
    NotExclusiveError,
    StepkeeperError,
    StorageError,
    TransientStorageError,
    UnsharedRootError,
)
from stepkeeper.log.entries import new_nonce
from stepkeeper.log.tail import find_tail
from stepkeeper.storage.base import PROBE_PREFIX, Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["Collectives", "RootProof", "prove_shared"]

_NAMED_HOSTS: Final = 8
_MEET_S: Final = 3600.0
_SLACK_S: Final = 300.0
"""What a rank may take beyond its patience: requests that hang."""


class Collectives(Protocol):
    """The ranks among themselves, as `Gang` has them. All ranks call the same methods with the same names."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]: ...

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]: ...


class RootProof:
    """The proof for one process's store, made once: before its first claim."""

    def __init__(self, store: Store, ranks: Collectives, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._store = store
        self._ranks = ranks
        self._patience = patience
        self.made = False
        """It was said before."""

    def make(self) -> None:
        """As `prove_shared`; nothing if that was said before. Ranks: all, at the same points.

        In the train thread, unless the training has ended: it draws Python's random numbers, and puts them back.
        """
        if self.made:
            return
        # Clients of buckets draw from Python's own numbers (multipart boundaries); the training goes on with its.
        numbers = random.getstate()
        try:
            prove_shared(self._store, self._ranks, patience=self._patience)
        finally:
            random.setstate(numbers)
        self.made = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """What one rank found where rank 0 had put the probe object."""

    rank: int
    host: str
    unshared: str | None = None
    """Why this can't be the root that rank 0 writes to."""

    overwrote: bool = False
    """It saw rank 0's object, and could put another over it all the same."""


def prove_shared(
    store: Store,
    ranks: Collectives,
    *,
    name: str = "probe",
    host: str | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> None:
    """All ranks have met, see one root, and a name in it can be taken once. Nothing of the proof stays there.

    `name` is what the ranks call this proof among themselves. What a store shows late is waited for, as long as
    `patience` says.

    Ranks: all; all of them raise the same.

    Raises:
        UnsharedRootError: hosts see other roots than rank 0 does; it names them.
        NotExclusiveError: of two writers of one name both won.
        StorageError: rank 0 may not write, there is no such bucket, or no answer in time.

    """
    own = socket.gethostname() if host is None else host
    ranks.gather(f"{name}/met", {}, _MEET_S)
    for number in count():
        verdict = _try_proof(store, ranks, f"{name}/{number}" if number else name, own, patience)
        if "again" not in verdict:
            break
    if "error" in verdict:
        raise decode_error(verdict["error"])


def _try_proof(store: Store, ranks: Collectives, name: str, own: str, patience: Patience) -> dict[str, Any]:
    """What rank 0 makes of one proof: nothing, an error, or that it has to be made again."""
    timeout_s = patience.total_s + _SLACK_S
    placed: dict[str, Any] | None = None
    if ranks.rank == 0:
        try:
            placed = {"path": _place_probe(store, patience), "host": own}
        except StepkeeperError as error:
            placed = {"error": encode_error(error)}
    placed = ranks.broadcast(f"{name}/placed", placed, _MEET_S)
    if "error" in placed:
        return placed
    path = str(placed["path"])
    finding = _look_for_probe(store, path, ranks, own, patience)
    findings = ranks.gather(f"{name}/found", encode(finding), timeout_s)
    verdict: dict[str, Any] | None = None
    if ranks.rank == 0:
        verdict = _clean_up(store, path, patience, [decode(_Finding, each) for each in findings], own)
    return ranks.broadcast(f"{name}/verdict", verdict, timeout_s)


def _place_probe(store: Store, patience: Patience) -> str:
    """Where rank 0's probe object is: its path ends with its content, and a second put of it has lost."""
    nonce = new_nonce()
    path = f"{PROBE_PREFIX}{find_tail(store, patience) + 1:08d}-{nonce}"
    # False may be the answer to a second try of a put that had gone through: no other knows the nonce.
    patience.retry(lambda: store.put_if_absent(path, nonce.encode()))
    if patience.retry(lambda: store.put_if_absent(path, b"second")):
        raise NotExclusiveError(
            f"{store.uri}: an object was put twice under one name, and both times it was said that nothing had been "
            "there: no log can live on this store; put the root on another one"
        )
    return path


def _look_for_probe(store: Store, path: str, ranks: Collectives, host: str, patience: Patience) -> _Finding:
    """Whether this rank sees rank 0's object; the last rank tries to take its name, too."""
    expected = path.rpartition("-")[2].encode()
    asks_to_take = ranks.rank == ranks.world_size - 1 and ranks.rank != 0
    pauses_s = patience.pauses_s()
    unshared: str | None = None
    while True:
        try:
            found = store.read(path)
        except MissingObjectError:
            # Who sees nothing where a name was taken sees late; who can take it has a root of its own.
            unshared, final = _try_to_take(store, path)
        except TransientStorageError as error:
            unshared, final = f"no answer: {error}", False
        except StorageError as error:
            unshared, final = str(error), True
        else:
            unshared = None if found == expected else f"another object is there, of {len(found)} bytes"
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
    """Why rank 0's object isn't seen, and whether it never will be."""
    try:
        if not store.put_if_absent(path, b"another"):
            return "it isn't shown there yet", False
        store.delete(path)
    except TransientStorageError as error:
        return f"no answer: {error}", False
    except StorageError as error:
        return str(error), True
    return "a folder or bucket of its own", True


def _could_take(store: Store, path: str) -> bool:
    """True: a put under a name that is taken won. No answer is none."""
    try:
        return store.put_if_absent(path, b"last")
    except StorageError:
        return False


def _clean_up(
    store: Store, path: str, patience: Patience, findings: Sequence[_Finding], host: str
) -> dict[str, Any]:
    """Rank 0's verdict, once the probe object is gone."""
    try:
        patience.retry(lambda: store.delete(path))
        refusal = _verdict(store.uri, findings, host)
        if refusal is None:
            return {}
        # Since somebody has begun at that slot, a collection may have taken the object.
        next_slot = int(path.removeprefix(PROBE_PREFIX).partition("-")[0])
        return (
            {"again": True} if find_tail(store, patience) >= next_slot else {"error": encode_error(refusal)}
        )
    except StepkeeperError as error:
        return {"error": encode_error(error)}


def _verdict(uri: str, findings: Sequence[_Finding], host: str) -> StepkeeperError | None:
    """Why these ranks can't claim `uri`; None if they can. Pure."""
    if any(finding.overwrote for finding in findings):
        return NotExclusiveError(
            f"{uri}: two hosts took one name: no log can live on this store; put the root on another one"
        )
    by_host: dict[str, list[_Finding]] = {}
    for finding in findings:
        if finding.unshared is not None:
            by_host.setdefault(finding.host, []).append(finding)
    if not by_host:
        return None
    named = [
        f"{name} (rank {', '.join(str(finding.rank) for finding in found[:4])}{', …' if len(found) > 4 else ''}: "
        f"{found[0].unshared})"
        for name, found in by_host.items()
    ]
    more = f" and {len(named) - _NAMED_HOSTS} other hosts" if len(named) > _NAMED_HOSTS else ""
    return UnsharedRootError(
        f"{uri} isn't one place for all hosts: what {host} (rank 0) wrote there isn't seen by "
        f"{'; '.join(named[:_NAMED_HOSTS])}{more}. Use a bucket, or a file system that all hosts have mounted there"
    )
