"""Receive the cloud's notices of preemption and maintenance, before SIGTERM or without one."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol
from weakref import WeakMethod

from stepkeeper.contract import Cause
from stepkeeper.loggers import logger
from stepkeeper.training.cloud.metadata_server import MetadataValue

__all__ = ["CloudNotice", "CloudNotices", "KeyServer", "read_cloud_notice"]

_log: Final = logger(__name__)
_KEYS: Final = ("preempted", "maintenance-event", "upcoming-maintenance")
_WAIT_S: Final = 60.0
"""Seconds after which the server answers even if the key hasn't changed."""

_PAUSES_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Pauses between requests while the server doesn't answer, as happens for a while now and then."""

_QUIET_S: Final = 60.0
"""The pause between requests while the server has no notice: it doesn't wait for a change then."""

_ABSENT_S: Final = 600.0
"""The pause between requests for a key that the server doesn't have. GKE's server has few keys."""


class KeyServer(Protocol):
    """A server with keys of this machine; `MetadataServer` is the real one."""

    def wait_for_change(self, key: str, etag: str | None, timeout_s: float) -> MetadataValue: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNotice:
    """An announcement of the cloud for this machine."""

    cause: Cause
    """SpotPreemption: the machine is removed in a moment. Maintenance: it is removed or paused at its start."""

    begins_unix_s: float | None
    """Its start, by the wall clock; None: now or in a moment."""


def read_cloud_notice(key: str, text: str) -> CloudNotice | None:
    """Read the value of a key of the metadata server; None if it announces nothing, or an unknown kind."""
    match key:
        case "preempted" if text.upper() == "TRUE":
            return CloudNotice(cause=Cause.SPOT_PREEMPTION, begins_unix_s=None)
        case "maintenance-event" if text.startswith("TERMINATE_"):
            return CloudNotice(cause=Cause.MAINTENANCE, begins_unix_s=None)
        case "upcoming-maintenance":
            return _read_window(text)
        case _:
            return None


def _read_window(text: str) -> CloudNotice | None:
    try:
        window = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(window, dict):
        return None
    fields = {str(name).replace("_", "").lower(): value for name, value in window.items()}
    begins = fields.get("windowstarttime")
    try:
        begins_unix_s = datetime.fromisoformat(str(begins)).timestamp()
    except (ValueError, OverflowError):
        return None
    return CloudNotice(cause=Cause.MAINTENANCE, begins_unix_s=begins_unix_s)


class CloudNotices:
    """Watch the metadata server, in a thread for each key, and pass its announcements on.

    The threads hold their callback weakly, so that they end with a manager that is dropped without being closed.
    """

    def __init__(self, server: KeyServer, on_change: Callable[[str, CloudNotice | None], None]) -> None:
        """Watch nothing yet. A thread calls the method `on_change` with a key and its announcement."""
        self._server = server
        self._on_change = WeakMethod(on_change)
        self._closing = threading.Event()

    def start(self) -> None:
        """Start to watch. Threads that wait for an answer keep no process alive."""
        for key in _KEYS:
            watch = _KeyWatch(key, self._server, self._on_change, self._closing)
            threading.Thread(target=watch.run, name=f"cloud-{key}", daemon=True).start()

    def close(self) -> None:
        """Stop watching. No more announcements are passed on."""
        self._closing.set()


class _KeyWatch:
    """Watch one key."""

    def __init__(
        self,
        key: str,
        server: KeyServer,
        on_change: "WeakMethod[Callable[[str, CloudNotice | None], None]]",
        closing: threading.Event,
    ) -> None:
        self._key = key
        self._server = server
        self._on_change = on_change
        self._closing = closing
        self._etag: str | None = None
        self._text = ""
        self._n_failures = 0

    def run(self) -> None:
        """Send requests until the watch is closed or the callback's object is gone."""
        while not self._closing.is_set() and self._on_change() is not None:
            began_s = time.monotonic()
            try:
                found = self._server.wait_for_change(self._key, self._etag, _WAIT_S)
            except OSError as error:
                self._pause_after(error)
                continue
            self._n_failures = 0
            if found.is_quiet:
                self._closing.wait(_QUIET_S)
                continue
            self._take_over(found)
            if found.text is None:
                self._closing.wait(_ABSENT_S)
            elif not found.etag or time.monotonic() - began_s < _PAUSES_S[0]:
                # Pause before the next request to a server that doesn't wait.
                self._closing.wait(_PAUSES_S[0])

    def _take_over(self, found: MetadataValue) -> None:
        self._etag = found.etag or None
        # A removed key withdraws its announcement.
        text = found.text or ""
        before = read_cloud_notice(self._key, self._text)
        self._text = text
        notice, notify = read_cloud_notice(self._key, text), self._on_change()
        # Another text may announce the same. `notify` is None if its object, a manager's part, was dropped.
        if notice == before or notify is None or self._closing.is_set():
            return
        try:
            notify(self._key, notice)
        except Exception:  # the thread has to stay for the next announcement
            _log.exception("handling the cloud's announcement %s=%r failed", self._key, text)

    def _pause_after(self, error: OSError) -> None:
        pause_s = _PAUSES_S[min(self._n_failures, len(_PAUSES_S) - 1)]
        self._n_failures += 1
        if self._n_failures == len(_PAUSES_S):
            _log.info(
                "the machine's metadata server gives no answer for %s (%s); retrying every %.0f s. SIGTERM still "
                "stops the training",
                self._key,
                error,
                _PAUSES_S[-1],
            )
        self._closing.wait(pause_s)
