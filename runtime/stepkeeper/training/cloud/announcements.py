"""React to the cloud's announcements for this machine: stop for a preemption, save before a maintenance."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper.loggers import logger
from stepkeeper.training.cloud.cloud_notices import CloudNotice, CloudNotices
from stepkeeper.training.cloud.metadata_server import MetadataServer, find_metadata_host

__all__ = ["Announcements", "maintenance_request", "save_lead_s"]

_log: Final = logger(__name__)
_IMMINENT_S: Final = 120.0
"""Seconds before a maintenance from which on it counts as the cause of the process's end."""

_PAST_S: Final = 3600.0
"""Seconds after a maintenance's start at which it is over, even if it is still announced."""

_UNMEASURED_S: Final = 300.0
"""Seconds before a maintenance at which to save if no save was measured."""

_LEAST_LEAD_S: Final = 60.0
_SAFETY: Final = 3.0
"""The factor on a measured save's time by which the save is requested earlier."""

_SAME_S: Final = 600
"""Hosts that get a maintenance notice without a date in the same ten minutes request one save."""


def save_lead_s(save_s: float | None) -> float:
    """Return the seconds before a maintenance at which the training saves, by those that a save took."""
    return _UNMEASURED_S if save_s is None else max(_LEAST_LEAD_S, _SAFETY * save_s)


def maintenance_request(notice: CloudNotice, now_unix_s: float) -> str:
    """Name the save for a maintenance, so that the hosts of a slice, maintained together, request one."""
    if notice.begins_unix_s is not None:
        return f"maintenance/{int(notice.begins_unix_s)}"
    return f"maintenance/now/{int(now_unix_s) // _SAME_S}"


class Announcements:
    """Hold the cloud's announcements, and request the stop or the save for them. Any thread may call this."""

    def __init__(
        self,
        *,
        stop: Callable[[], object],
        save: Callable[[str], object],
        save_s: Callable[[], float | None],
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Store the callbacks; nothing is watched before `start`."""
        self._stop = stop
        self._save = save
        self._save_s = save_s
        self._now_unix_s = now_unix_s
        self._lock = threading.Lock()
        self._announced: dict[str, CloudNotice] = {}
        """The current announcements, by the keys of the metadata server."""

        self._names: dict[str, str] = {}
        """By key, the name of the request to save, made when the announcement came."""

        self._requested: set[str] = set()
        self._cloud: CloudNotices | None = None

    @property
    def cause(self) -> Cause | None:
        """The cause of an end at this time; None if no announcement explains it."""
        with self._lock:
            announced = tuple(self._announced.values())
        if any(notice.cause is Cause.SPOT_PREEMPTION for notice in announced):
            return Cause.SPOT_PREEMPTION
        now_unix_s = self._now_unix_s()
        near = (notice for notice in announced if -_PAST_S <= _left_s(notice, now_unix_s) <= _IMMINENT_S)
        return next((notice.cause for notice in near), None)

    def start(self, environ: Mapping[str, str] = os.environ) -> None:
        """Watch the machine's metadata server from now on, if this is a machine of Google Cloud."""
        host = find_metadata_host(environ)
        if host is not None and self._cloud is None:
            self._cloud = CloudNotices(MetadataServer(host), self.take_over)
            self._cloud.start()

    def take_over(self, key: str, notice: CloudNotice | None) -> None:
        """Apply the current announcement of a key of the metadata server; None if there is none left."""
        with self._lock:
            if notice is None:
                self._announced.pop(key, None)
            else:
                self._announced[key] = notice
                self._names[key] = maintenance_request(notice, self._now_unix_s())
        if notice is None:
            _log.info("the cloud withdrew its announcement %s", key)
        elif notice.cause is Cause.SPOT_PREEMPTION:
            self._stop()
            _log.warning("the cloud is preempting this machine")
        else:
            left_s = max(0.0, _left_s(notice, self._now_unix_s()))
            lead_s = save_lead_s(self._save_s())
            when = "at once" if left_s <= lead_s else f"{lead_s:.0f} s before"
            _log.warning(
                "the cloud will maintain this machine in %.0f s: all ranks save one step %s and keep training",
                left_s,
                when,
            )
            self.check()

    def check(self) -> None:
        """Request the save before a maintenance, once, when it is due."""
        now_unix_s, lead_s = self._now_unix_s(), save_lead_s(self._save_s())
        with self._lock:
            near = [
                key
                for key, notice in self._announced.items()
                if notice.cause is Cause.MAINTENANCE and _left_s(notice, now_unix_s) <= lead_s
            ]
            # One maintenance may be announced under two keys, of which one has the date: it names the request.
            dated = [key for key in near if self._announced[key].begins_unix_s is not None]
            due = {self._names[key] for key in dated or near} - self._requested
            self._requested |= due
        for request in sorted(due):
            self._save(request)

    def close(self) -> None:
        """Stop watching."""
        if self._cloud is not None:
            self._cloud.close()


def _left_s(notice: CloudNotice, now_unix_s: float) -> float:
    return 0.0 if notice.begins_unix_s is None else notice.begins_unix_s - now_unix_s
