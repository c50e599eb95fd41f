"""Pin a commit that is to be read, and renew the pin: the holder's half of what keeps data from deletion."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from stepkeeper.errors import PinLostError, StorageError, TransientStorageError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.retention.pins import Pin, list_names_of, put_pin, remove_pin
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["pin_commit", "renew_pin"]

_log: Final = logger(__name__)


def pin_commit(
    log: Log,
    store: Store,
    choose: Callable[[LogState], CommitRecord],
    *,
    holder: str,
    host: str | None = None,
    nonce: str | None = None,
    root: str | None = None,
    reason: str = "",
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[Pin | None, CommitRecord]:
    """Choose a commit and pin it; `renew_pin` keeps it, `remove_pin` lets it go.

    Where nothing may be written to the root the pin is None, and a warning is logged: a deletion can take the
    data away while it is read then.

    Args:
        log: The root's log.
        store: The root.
        choose: Picks the commit. It is called again if its pick was deleted before the pin was there.
        holder: Whose pin it is, for people.
        host: The holder's host, for people.
        nonce: The pin's own; drawn by default.
        root: URI of the root that is forked from the commit. Its pin has no lease: nobody renews it while the fork
            waits for machines.
        reason: Why it is pinned, for people.
        patience: How long to wait for answers.

    Returns:
        The pin, and the commit.

    Raises:
        StorageError: No answer. What `choose` raises is raised too.

    """
    state = log.open() if log.state.tail < 0 else log.refresh()
    mine = Pin(slot=0, nonce=nonce or new_nonce(), holder=holder, host=host, root=root, reason=reason)
    while True:
        pin = replace(mine, slot=choose(state).slot, seen=None if root else state.tail)
        pinned = _put_if_allowed(store, pin, patience)
        # A deletion lists the pins after its entry: either it saw this one, or its entry is seen here.
        try:
            state = log.refresh()
        except BaseException:
            if pinned:
                _let_go(store, pin)
            raise
        if pin.slot in state.commits:
            return (pin if pinned else None), state.commits[pin.slot]
        if pinned:
            remove_pin(store, pin, patience=patience)


def _let_go(store: Store, pin: Pin) -> None:
    """Remove the pin if the store takes one more request; what it was put for has failed already."""
    try:
        store.delete(pin.path)
    except StorageError as error:
        _log.warning("a pin is left until its lease is over: %s/%s: %s", store.uri, pin.path, error)


def _put_if_allowed(store: Store, pin: Pin, patience: Patience) -> bool:
    try:
        put_pin(store, pin, patience=patience)
    except TransientStorageError:
        raise
    except StorageError as error:
        _log.warning(
            "commit %d of %s is read without a pin: a deletion may take its data away meanwhile (%s)",
            pin.slot,
            store.uri,
            error,
        )
        return False
    return True


def renew_pin(log: Log, store: Store, pin: Pin, *, patience: Patience = DEFAULT_PATIENCE) -> Pin:
    """Tell the root that the commit is still being read, by a new name for the pin.

    The lease runs by the log's progress. Where the log hasn't moved since the last time, nothing is put.

    Args:
        log: The root's log.
        store: The root.
        pin: The pin as it was renewed last.
        patience: How long to wait for answers.

    Returns:
        The pin as it is now.

    Raises:
        PinLostError: A collection has found the lease to be over, or a person has removed the pin.
        StorageError: No answer. The pin may have been renewed.

    """
    state = log.open() if log.state.tail < 0 else log.refresh()
    renewed = replace(pin, seen=state.tail)
    if renewed == pin:
        return pin
    put_pin(store, renewed, patience=patience)
    # A collection removes every name of a pin that is over, and lists again before it deletes data. So either an
    # older name is still here, and the collection will find the new one, or the pin is lost.
    older = [name for name in list_names_of(store, pin, patience=patience) if name.seen != renewed.seen]
    if not older:
        _let_go(store, renewed)
        raise PinLostError(
            f"{store.uri}/{pin.path} is gone: it wasn't renewed for too long, or somebody removed it; the data of "
            f"commit {pin.slot} may be deleted while it is read"
        )
    # One older name stays: a listing of a folder may miss a name that comes, or goes, while it is made.
    for name in older[:-1]:
        patience.retry(partial(store.delete, name.path))
    return renewed
