"""Hold a commit by a pin that a thread renews until it is released, however the holder ends."""

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from stepkeeper.errors import PinLostError, StepkeeperError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.loggers import logger
from stepkeeper.retention.leases import RENEW_EVERY_S
from stepkeeper.retention.pins import Pin, is_pinned, pin_commit, remove_pin, renew_pin
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["HeldPin", "hold_commit", "release_all_pins"]

_log: Final = logger(__name__)
_RENEWING_S: Final = 30.0
"""How long one renewal is retried."""

_RELEASE_S: Final = 120.0
"""A little more than the patience with which a pin is removed."""

_EXIT_S: Final = 5.0
"""How long a process that ends waits for its pins to be removed."""


class HeldPin:
    """Renew one pin from a separate thread, which removes it once it is released.

    Any thread may call every method, and so may a finalizer: only `is_held` makes requests to the store.
    """

    def __init__(
        self,
        store: Store,
        pin: Pin,
        *,
        read_s: float,
        renew_every_s: float = RENEW_EVERY_S,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """Start to renew `pin`. The log was read for it at `read_s`, when its lease begins."""
        self._store, self._pin, self._patience = store, pin, patience
        self._read_s, self._renew_every_s = read_s, renew_every_s
        self._pid: Final = os.getpid()
        self._released = threading.Event()
        self._renewing = threading.Lock()
        self._is_lost = False
        self._renewing_patience = Patience(total_s=_RENEWING_S, sleep=self._pause)
        self._thread = threading.Thread(target=self._run, name="stepkeeper-pin", daemon=True)
        _held_pins.add(self)
        self._thread.start()

    def is_held(self) -> bool:
        """Ask the store whether the pin still keeps its commit from deletion. Raises StorageError."""
        # Wait for a renewal in progress: it may find that the pin is lost.
        with self._renewing:
            return not self._is_lost and is_pinned(self._store, self._pin, patience=self._patience)

    def request_release(self) -> None:
        """Make the thread remove the pin, without waiting for it."""
        self._released.set()

    def release(self, limit_s: float = _RELEASE_S) -> None:
        """Remove the pin, and wait for that, but not longer than `limit_s`. A failure is logged."""
        self.request_release()
        # A forked child has no such thread, and the pin is its parent's. The thread can't wait for itself.
        if os.getpid() != self._pid or self._thread is threading.current_thread():
            return
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._log_left(f"{self._store.uri} gave no answer for {limit_s:.0f} s")

    def _run(self) -> None:
        try:
            log = Log(self._store, patience=self._renewing_patience)
            while not self._released.wait(max(0.0, self._read_s + self._renew_every_s - time.monotonic())):
                if not self._renew(log):
                    return
            self._remove()
        finally:
            _held_pins.discard(self)

    def _renew(self, log: Log) -> bool:
        """Renew the pin; False if it is lost."""
        begun_s = time.monotonic()
        with self._renewing:
            try:
                self._pin = renew_pin(log, self._store, self._pin, patience=self._renewing_patience)
            except PinLostError as error:
                self._is_lost = True
                _log.warning("%s", error)
                return False
            except StepkeeperError as error:
                if not self._released.is_set():
                    _log.warning("the pin of commit %d isn't renewed yet: %s", self._pin.slot, error)
                # Retry sooner than after a whole interval: the lease keeps running.
                begun_s -= 0.9 * self._renew_every_s
        self._read_s = begun_s
        return True

    def _remove(self) -> None:
        try:
            remove_pin(self._store, self._pin, patience=self._patience)
        except StepkeeperError as error:
            self._log_left(error)

    def _log_left(self, why: object) -> None:
        _log.warning(
            "pin %s stays until its lease is over, or `stepkeeper gc %s --pins --remove %s` removes it: %s",
            self._pin.name.text,
            self._store.uri,
            self._pin.name.text,
            why,
        )

    def _pause(self, pause_s: float) -> None:
        """Sleep between two tries of a renewal, unless the pin was released."""
        self._released.wait(pause_s)


def hold_commit(
    log: Log, store: Store, choose: Callable[[LogState], CommitRecord], *, holder: str, host: str, reason: str
) -> tuple[HeldPin | None, CommitRecord]:
    """Choose a commit and hold it as `pin_commit` does, from now until the pin is released.

    Returns no pin where nothing may be written to the root.
    """
    read_s = time.monotonic()
    pin, record = pin_commit(log, store, choose, holder=holder, host=host, reason=reason)
    return (None if pin is None else HeldPin(store, pin, read_s=read_s)), record


_held_pins: Final[set[HeldPin]] = set()
"""The pins whose threads run. Copy it in one step: threads add pins, and remove them, without a lock."""


@atexit.register
def release_all_pins() -> None:
    """Remove all pins of this process, as far as the stores answer soon. Also called when the interpreter ends."""
    held = list(_held_pins)
    for pin in held:
        pin.request_release()
    ends_s = time.monotonic() + _EXIT_S
    for pin in held:
        pin.release(max(0.0, ends_s - time.monotonic()))
