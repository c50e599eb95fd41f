"""Prove that only one of two creates of a name wins in a store."""

import re
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from stepkeeper.errors import MissingObjectError, NotExclusiveError
from stepkeeper.storage.base import LOG_PREFIX, PROBE_PREFIX, Store
from stepkeeper.storage.retry import Patience

__all__ = ["RACERS", "Create", "make_refusal", "prove_exclusive_create"]

RACERS: Final = 8
_ROUNDS: Final = 3
_SLOT: Final = re.compile(r"(?:0-)?([0-9]{8,})\.json")

Create = Callable[[str, bytes], bool]
"""Tries once to create the object at a path; returns False if it existed. Raises StorageError."""


def prove_exclusive_create(store: Store, create: Create, patience: Patience) -> None:
    """Race creates of unused names, in several rounds, by the store's own `create` without retries.

    Raises NotExclusiveError if more than one create of a name has won, or none; StorageError.
    """
    next_slot = _find_next_slot(store, patience)
    while True:
        try:
            for _ in range(_ROUNDS):
                path = f"{PROBE_PREFIX}create-{next_slot:08d}-{secrets.token_hex(16)}"
                _race_creates(store, create, path, patience)
        except (NotExclusiveError, MissingObjectError):
            # If another process has begun at that slot, a collection may have deleted the objects of this proof.
            before, next_slot = next_slot, _find_next_slot(store, patience)
            if next_slot == before:
                raise
        else:
            return


def make_refusal(uri: str, why: str) -> NotExclusiveError:
    """Build the error that refuses the store at `uri`."""
    return NotExclusiveError(
        f"{uri}: two writers of one name could both succeed ({why}), so two jobs, or two starts of one, could "
        "overwrite each other's commits. Use gs://, an s3:// with conditional writes, or file:// on a file system "
        "that all hosts share; or pass Options(unsafe_single_writer=True) if nothing else ever writes there"
    )


def _find_next_slot(store: Store, patience: Patience) -> int:
    """Find the slot after the last one of the log; 0 if there is no log."""
    listed = patience.retry(lambda: store.list(LOG_PREFIX))
    slots = [_SLOT.fullmatch(stat.path.removeprefix(LOG_PREFIX)) for stat in listed]
    return max((int(slot[1]) + 1 for slot in slots if slot), default=0)


def _race_creates(store: Store, create: Create, path: str, patience: Patience) -> None:
    """Check that one of many creates of `path` at once has won, and that a later one has lost."""
    start = threading.Barrier(RACERS)

    def race(number: int) -> bool:
        start.wait()
        return _put_once(store, create, path, str(number).encode(), patience)

    try:
        with ThreadPoolExecutor(RACERS, thread_name_prefix="stepkeeper-proof") as pool:
            won = [number for number, first in enumerate(pool.map(race, range(RACERS))) if first]
        if _put_once(store, create, path, b"late", patience):
            raise make_refusal(store.uri, "a create of an existing name succeeded")
        if len(won) != 1:
            raise make_refusal(store.uri, f"{len(won)} of {RACERS} simultaneous creates of one name won")
        there = patience.retry(lambda: store.read(path))
        if there != str(won[0]).encode():
            raise make_refusal(store.uri, f"it holds {there!r}, although the create of {won[0]!r} had won")
    finally:
        patience.retry(lambda: store.delete(path))


def _put_once(store: Store, create: Create, path: str, data: bytes, patience: Patience) -> bool:
    """Put once, and return True if this put won, by the stored bytes if a try got no answer."""
    is_unanswered = False
    """True if a try got no answer. Then an object that exists may be its own."""

    def put() -> bool:
        nonlocal is_unanswered
        try:
            won = create(path, data)
        except BaseException:
            is_unanswered = True
            raise
        return won or (is_unanswered and store.read(path) == data)

    return patience.retry(put)
