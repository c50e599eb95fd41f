"""Pin commits: a reader's pin keeps deletion away from a commit's data as long as the pin is there."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from stepkeeper.contract.wire import ContractError, decode, encode, encode_json
from stepkeeper.errors import (
    MissingObjectError,
    PinFormatError,
    StorageError,
    TransientStorageError,
)
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "PIN_PREFIX",
    "Pin",
    "list_pins",
    "pin_commit",
    "pin_path",
    "pinned_slots",
    "put_pin",
    "remove_pin",
]

_log: Final = logger(__name__)
PIN_PREFIX: Final = ".stepkeeper/pins/"
FORMAT: Final = 1
_NAME: Final = re.compile(r"([0-9]{8,})-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A note that somebody reads the commit of `slot`."""

    slot: int
    nonce: str
    """The pin's own; a fork's is the nonce of its root, so that every attempt of the fork finds its pin."""

    holder: str
    """The owner of the pin, for people."""

    root: str | None = None
    """URI of the root that was forked from the commit."""

    reason: str = ""

    def to_json(self) -> bytes:
        return encode_json({"format": FORMAT, **encode(self)})

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Pin":
        """Decode a pin. Raises PinFormatError that names `where`, the pin's object."""
        try:
            raw: Any = json.loads(data)
            if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
                raise PinFormatError(f"{where} is no pin of format {FORMAT}: use the release that wrote it")
            return decode(cls, raw)
        except (ContractError, ValueError, TypeError) as error:
            raise PinFormatError(f"{where} is no pin: {error!r}") from error


def pin_path(slot: int, nonce: str) -> str:
    return f"{PIN_PREFIX}{slot:08d}-{nonce}"


def put_pin(store: Store, pin: Pin, *, patience: Patience = DEFAULT_PATIENCE) -> None:
    """Put a pin durably. Raises StorageError; after a transient one it may be there, or may still come."""
    data = pin.to_json()
    patience.retry(lambda: store.put_if_absent(pin_path(pin.slot, pin.nonce), data))


def remove_pin(store: Store, pin: Pin, *, patience: Patience = DEFAULT_PATIENCE) -> None:
    """Remove a pin, if it is there. Raises StorageError."""
    patience.retry(lambda: store.delete(pin_path(pin.slot, pin.nonce)))


def pinned_slots(store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> frozenset[int]:
    """List the slots that have a pin, by names alone: a pin that can't be read holds all the same."""
    return frozenset(slot for slot, _ in _listed(store, patience))


def list_pins(store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> list[Pin]:
    """Read all pins, by slot. Raises PinFormatError for one that says something else than its name."""
    pins = []
    for slot, nonce in _listed(store, patience):
        path = pin_path(slot, nonce)
        try:
            data = patience.retry(partial(store.read, path))
        except MissingObjectError:
            # The pin was removed meanwhile.
            continue
        pin = Pin.from_json(data, f"{store.uri}/{path}")
        if (pin.slot, pin.nonce) != (slot, nonce):
            raise PinFormatError(f"{store.uri}/{path} says that it is pin {pin.slot}-{pin.nonce}")
        pins.append(pin)
    return pins


def pin_commit(
    log: Log,
    store: Store,
    choose: Callable[[LogState], CommitRecord],
    *,
    holder: str,
    nonce: str | None = None,
    root: str | None = None,
    reason: str = "",
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[Pin | None, CommitRecord]:
    """Choose a commit and pin it; `remove_pin` lets it go.

    Where nothing may be written to the root the pin is None, and a warning is logged: a deletion can take the
    data away while it is read then.

    Args:
        log: The root's log.
        store: The root.
        choose: Picks the commit. It is called again if its pick was deleted before the pin was there.
        holder: Whose pin it is, for people.
        nonce: The pin's own; drawn by default.
        root: URI of the root that is forked from the commit.
        reason: Why it is pinned, for people.
        patience: How long to wait for answers.

    Returns:
        The pin, and the commit.

    Raises:
        StorageError: No answer. What `choose` raises is raised too.

    """
    state = log.open() if log.state.tail < 0 else log.refresh()
    mine = Pin(slot=0, nonce=nonce or new_nonce(), holder=holder, root=root, reason=reason)
    while True:
        pin = replace(mine, slot=choose(state).slot)
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
        store.delete(pin_path(pin.slot, pin.nonce))
    except StorageError as error:
        path = pin_path(pin.slot, pin.nonce)
        _log.warning("a pin is left, remove it by hand: %s/%s: %s", store.uri, path, error)


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


def _listed(store: Store, patience: Patience) -> list[tuple[int, str]]:
    found = patience.retry(lambda: store.list(PIN_PREFIX))
    names = (_NAME.fullmatch(stat.path.removeprefix(PIN_PREFIX)) for stat in found)
    return [(int(name[1]), name[2]) for name in names if name]
