"""Put, renew, list and remove pins. A pin protects the data of a commit that is being read from deletion."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from stepkeeper.contract.wire import ContractError, decode, encode, encode_json
from stepkeeper.errors import (
    MissingObjectError,
    PinFormatError,
    PinLostError,
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
    "PinName",
    "is_pinned",
    "list_pin_names",
    "list_pins",
    "newest_of",
    "pin_commit",
    "pin_path",
    "pinned_slots",
    "put_pin",
    "read_pin",
    "remove_pin",
    "renew_pin",
]

_log: Final = logger(__name__)

PIN_PREFIX: Final = ".stepkeeper/pins/"
FORMAT: Final = 1
_NAME: Final = re.compile(r"([0-9]{8,})-([0-9a-f]{32})(?:-([0-9]{8,}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PinName:
    """The name of a pin's object, which contains everything that a collection needs."""

    slot: int
    nonce: str
    seen: int | None
    """The last slot of the log that the holder had read; None if the pin has no lease."""

    time_unix_s: float | None = field(default=None, compare=False)
    """When the object was put, by the store's own clock, if the store reports it."""

    @property
    def path(self) -> str:
        return pin_path(self.slot, self.nonce, self.seen)

    @property
    def text(self) -> str:
        """Name for people, which renewals don't change."""
        return f"{self.slot:08d}-{self.nonce}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A note that a process reads the commit of `slot`."""

    slot: int
    nonce: str
    """The pin's nonce."""

    holder: str
    """The owner of the pin, for people."""

    host: str | None = None
    """The host of the owner, for people."""

    seen: int | None = None
    """The last slot of the log that the holder had read when it put the pin, or renewed it last.

    None: the pin has no lease, and holds until a user removes it.
    """

    reason: str = ""

    @property
    def name(self) -> PinName:
        return PinName(slot=self.slot, nonce=self.nonce, seen=self.seen)

    @property
    def path(self) -> str:
        return self.name.path

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


def pin_path(slot: int, nonce: str, seen: int | None = None) -> str:
    return f"{PIN_PREFIX}{slot:08d}-{nonce}" + ("" if seen is None else f"-{seen:08d}")


def put_pin(store: Store, pin: Pin, *, patience: Patience = DEFAULT_PATIENCE) -> None:
    """Put a pin durably. Raises StorageError; after a transient one it may be there, or may still come."""
    data = pin.to_json()
    patience.retry(lambda: store.put_if_absent(pin.path, data))


def remove_pin(store: Store, pin: Pin | PinName, *, patience: Patience = DEFAULT_PATIENCE) -> None:
    """Remove a pin with its renewals, if it exists. Raises StorageError."""
    for name in _list_names_of(store, pin, patience=patience):
        patience.retry(partial(store.delete, name.path))


def is_pinned(store: Store, pin: Pin, *, patience: Patience = DEFAULT_PATIENCE) -> bool:
    """Return True if the pin still exists. Raises StorageError."""
    return bool(_list_names_of(store, pin, patience=patience))


def pinned_slots(store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> frozenset[int]:
    """List the slots that have a pin, by names alone: a pin that can't be read still holds."""
    return frozenset(name.slot for name in list_pin_names(store, patience=patience))


def list_pin_names(
    store: Store, prefix: str = PIN_PREFIX, *, patience: Patience = DEFAULT_PATIENCE
) -> list[PinName]:
    """List the names that start with `prefix`, renewals too, by slot and nonce and then from the oldest on."""
    found = patience.retry(lambda: store.list(prefix))
    names = ((_NAME.fullmatch(stat.path.removeprefix(PIN_PREFIX)), stat.time_unix_s) for stat in found)
    listed = [
        PinName(
            slot=int(name[1]),
            nonce=name[2],
            seen=None if name[3] is None else int(name[3]),
            time_unix_s=time_unix_s,
        )
        for name, time_unix_s in names
        if name
    ]
    return sorted(listed, key=lambda name: (name.slot, name.nonce, -1 if name.seen is None else name.seen))


def newest_of(names: Iterable[PinName]) -> tuple[PinName, ...]:
    """Select the newest name of each pin from `names`, sorted as listed. One without a lease always counts. Pure."""
    newest: dict[str, PinName] = {}
    for name in names:
        known = newest.get(name.text)
        if known is None or known.seen is not None:
            newest[name.text] = name
    return tuple(newest.values())


def list_pins(store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> list[Pin]:
    """Read all pins, by slot, each as it was renewed last. Raises PinFormatError."""
    names = newest_of(list_pin_names(store, patience=patience))
    pins = (read_pin(store, name, patience=patience) for name in names)
    return [pin for pin in pins if pin is not None]


def read_pin(store: Store, name: PinName, *, patience: Patience) -> Pin | None:
    """Read a pin; None if it was removed meanwhile. Raises PinFormatError if it contradicts its name."""
    try:
        data = patience.retry(partial(store.read, name.path))
    except MissingObjectError:
        return None
    pin = Pin.from_json(data, f"{store.uri}/{name.path}")
    if (pin.slot, pin.nonce, pin.seen) != (name.slot, name.nonce, name.seen):
        raise PinFormatError(f"{store.uri}/{name.path} contains pin {pin.path.removeprefix(PIN_PREFIX)}")
    return pin


def _list_names_of(store: Store, pin: Pin | PinName, *, patience: Patience) -> list[PinName]:
    """List the names of one pin, the oldest first."""
    return list_pin_names(store, pin_path(pin.slot, pin.nonce), patience=patience)


def pin_commit(
    log: Log,
    store: Store,
    choose: Callable[[LogState], CommitRecord],
    *,
    holder: str,
    host: str | None = None,
    reason: str = "",
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[Pin | None, CommitRecord]:
    """Choose a commit and pin it; `renew_pin` keeps it, `remove_pin` releases it.

    If the root can't be written to, the pin is None, and a warning is logged: a deletion can then remove the
    data while it is read.

    Args:
        log: The root's log.
        store: The root.
        choose: Picks the commit. It is called again if its pick was deleted before the pin was there.
        holder: Whose pin it is, for people.
        host: The holder's host, for people.
        reason: Why it is pinned, for people.
        patience: How long to wait for answers.

    Raises:
        StorageError: No answer. Errors of `choose` are raised too.
    """
    state = log.refresh()
    mine = Pin(slot=0, nonce=new_nonce(), holder=holder, host=host, reason=reason)
    while True:
        pin = replace(mine, slot=choose(state).slot, seen=state.tail)
        pinned = _put_if_allowed(store, pin, patience)
        # A deletion lists the pins after its entry: either it saw this one, or its entry is seen here.
        try:
            state = log.refresh()
        except BaseException:
            if pinned:
                _try_remove(store, pin)
            raise
        if pin.slot in state.commits:
            return (pin if pinned else None), state.commits[pin.slot]
        if pinned:
            remove_pin(store, pin, patience=patience)


def _try_remove(store: Store, pin: Pin) -> None:
    """Try once to remove the pin of an operation that has failed."""
    try:
        store.delete(pin.path)
    except StorageError as error:
        _log.warning("a pin stays until its lease is over: %s/%s: %s", store.uri, pin.path, error)


def _put_if_allowed(store: Store, pin: Pin, patience: Patience) -> bool:
    try:
        put_pin(store, pin, patience=patience)
    except TransientStorageError:
        raise
    except StorageError as error:
        _log.warning(
            "commit %d of %s is read without a pin: a deletion may remove its data meanwhile (%s)",
            pin.slot,
            store.uri,
            error,
        )
        return False
    return True


def renew_pin(log: Log, store: Store, pin: Pin, *, patience: Patience = DEFAULT_PATIENCE) -> Pin:
    """Renew the pin under a new name, which shows that the commit is still being read, and return it.

    The lease runs by the log's progress. If the log hasn't grown since the last renewal, nothing is put.
    Raises PinLostError if a collection has found the lease to be over, or a user has removed the pin;
    StorageError if there is no answer, and the pin may have been renewed.
    """
    state = log.refresh()
    renewed = replace(pin, seen=state.tail)
    if renewed == pin:
        return pin
    put_pin(store, renewed, patience=patience)
    # A collection removes every name of a pin that is over, and lists again before it deletes data. So either an
    # older name still exists, and the collection will find the new one, or the pin is lost.
    older = [name for name in _list_names_of(store, pin, patience=patience) if name.seen != renewed.seen]
    if not older:
        _try_remove(store, renewed)
        raise PinLostError(
            f"{store.uri}/{pin.path} is gone: it wasn't renewed for too long, or a user removed it; the data of "
            f"commit {pin.slot} may be deleted while it is read"
        )
    # One older name stays: a listing of a folder may miss a name that appears, or disappears, meanwhile.
    for name in older[:-1]:
        patience.retry(partial(store.delete, name.path))
    return renewed
