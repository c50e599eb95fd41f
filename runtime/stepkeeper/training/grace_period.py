"""Share out the time that a notice leaves: to waits, to saves, and to the end of the process."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from stepkeeper.contract import END_RESERVE_S, LAUNCHER_VARIABLE, TORCHRUN_VARIABLE
from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper.training.notices.announcements import PREEMPTED
from stepkeeper.training.notices.watcher import NoticeWatcher

__all__ = ["GracePeriod", "launcher_grace_s"]

_CLOSING_S: Final = 9.0
_CLOSING_STOPPED_S: Final = 4.0
_CLOSING_LATE_S: Final = 0.9
"""Seconds of END_RESERVE_S that the end of the manager gets."""

_LAST_RESORT_S: Final = 0.3
"""Seconds before the end of the grace period at which a process that hasn't ended by itself is ended."""

_LEAST_END_S: Final = 0.5
"""Seconds that a process has to end by itself that comes to its end when the grace period is as good as over."""

_PYTHONS_END_S: Final = 1.0
"""Seconds for the interpreter's own end after the manager's, where nobody has said how long the grace period is."""

_SILENCE_S: Final = 22.0
"""Seconds that a notice leaves to a wait without progress where nobody has said how long the grace period is.
Kubernetes and Slurm kill 30 s after SIGTERM unless they are told otherwise.
"""

_PREEMPTED_S: Final = 15.0
"""Seconds that a machine which the cloud preempts leaves to a pod: it goes after 30, and GKE's kubelet keeps half of
them for the system's pods.
"""

_TORCHRUN_S: Final = 30.0
"""Seconds after which torchrun kills its processes once it has handed SIGTERM on to them."""

_START_S: Final = 10.0
"""Seconds after a notice in which all ranks have to come to the start. Before it there is nothing to save, and a rank
that still builds its model may take longer than any grace period.
"""

_START_BEFORE_RANK_0_S: Final = 8.0
"""The same for the other ranks than rank 0, which has their store: they leave before it, also if they hear later."""

_KILLERS: Final = ("sigterm", "file", PREEMPTED)
"""Sources of notices behind which somebody kills the process soon. A rank that was told by another one hears from that
when it leaves.
"""

_SAVE_S: Final = 60.0
_SAVE_TOGETHER_S: Final = 10.0
"""The same with other ranks, who may have ended already."""


def launcher_grace_s(environ: Mapping[str, str]) -> float | None:
    """Return how many seconds a launcher leaves this process behind SIGTERM; None if it is nobody's that kills.

    Below stepkeeper's own launcher torchrun hears of SIGTERM when the first of its processes has ended.

    Args:
        environ: The process's environment.

    """
    return _TORCHRUN_S if TORCHRUN_VARIABLE in environ and LAUNCHER_VARIABLE not in environ else None


class GracePeriod:
    """Tell how much time the notices of this process leave, and to what. Any thread may ask."""

    def __init__(
        self, grace_s: float | None, notices: NoticeWatcher, *, launcher_s: float | None = None
    ) -> None:
        """Know how long the grace period is, and what begins it.

        Args:
            grace_s: Seconds from a notice until the process is killed; None if nobody has said so, as without an
                operator.
            notices: Know when the process was asked to stop, and by what.
            launcher_s: Seconds from SIGTERM until the process's launcher kills it; None if that never does.

        """
        self._grace_s = grace_s
        self._launcher_s = launcher_s
        self._notices = notices
        self._has_started: Callable[[], bool] = lambda: True
        self._start_s = _START_S

    def left_s(self) -> float | None:
        """Return the seconds left of the grace period.

        None without a notice that a process is killed for, or if nobody has said how long it is.
        """
        ends_s = self._ends_s
        return None if ends_s is None else max(0.0, ends_s - END_RESERVE_S - time.monotonic())

    def bound_s(self, limit_s: float) -> float:
        """Return `limit_s`, or the seconds left of the grace period if these are fewer."""
        left_s = self.left_s()
        return limit_s if left_s is None else min(limit_s, left_s)

    @contextmanager
    def starting(self, has_started: Callable[[], bool], *, rank: int) -> Iterator[None]:
        """Let this rank's waits within end soon after a notice while not `has_started`: there is nothing to save.

        Raises:
            NoticeDeadlineError: They have ended; or another rank that was told to stop has left before.

        """
        self._start_s = _START_S if rank == 0 else _START_BEFORE_RANK_0_S
        self._has_started = has_started
        try:
            yield
        except PeerLostError as error:
            if self._kill_told_s is None or has_started():
                raise
            raise NoticeDeadlineError(
                f"this rank was told to stop before all had come to the start, and another one has left: {error}"
            ) from error
        finally:
            self._has_started = lambda: True

    def wait_left_s(self, progress_s: float) -> float | None:
        """Return how many more seconds a wait may take; None without a notice.

        A known grace period ends all waits at its end. Where nobody has said how long it is, a wait, or a save, goes
        on as long as it makes progress.

        Args:
            progress_s: Time at which the wait began or a save made its last progress, by time.monotonic().

        """
        left_s = self._wait_left_s(progress_s)
        told_s = min((notice.monotonic_s for notice in self._notices.notices if notice.kills), default=None)
        if told_s is None or self._has_started():
            return left_s
        start_left_s = max(0.0, told_s + self._start_s - time.monotonic())
        return start_left_s if left_s is None else min(left_s, start_left_s)

    def _wait_left_s(self, progress_s: float) -> float | None:
        if self._grace_s is not None:
            return self.left_s()
        told_s = self._kill_told_s
        if told_s is None:
            return None
        return max(0.0, _SILENCE_S - (time.monotonic() - max(told_s, progress_s)))

    def save_timeout_s(self, *, alone: bool) -> float:
        """Return how many seconds a save in flight may take when an exception ends the process.

        Args:
            alone: True if no other rank has to take part in the save.

        """
        return self.bound_s(_SAVE_S if alone else _SAVE_TOGETHER_S)

    def closing_timeout_s(self) -> float:
        """Return how many seconds the end of the manager may take: the last report, and all that it waits for."""
        left_s = self.left_s()
        if left_s is None:
            return _CLOSING_STOPPED_S if self._is_to_be_killed else _CLOSING_S
        return min(_CLOSING_STOPPED_S, left_s + _CLOSING_LATE_S)

    def end_left_s(self) -> float | None:
        """Return how many seconds the end of the process may take; None if nobody kills it for a notice."""
        ends_s = self._ends_s
        if ends_s is not None:
            return max(_LEAST_END_S, ends_s - _LAST_RESORT_S - time.monotonic())
        return self.closing_timeout_s() + _PYTHONS_END_S if self._is_to_be_killed else None

    def is_overdue(self, stuck_since_s: float) -> bool:
        """Tell whether the process, which is in a call, would be killed in a moment.

        The grace period of a notice is as good as over. Where nobody has said how long it is, the call has gone on for
        longer than any wait and the end of the process may take.

        Args:
            stuck_since_s: Time at which the call began or a save made its last progress, by time.monotonic().

        """
        now_s, ends_s, told_s = time.monotonic(), self._ends_s, self._kill_told_s
        if ends_s is not None:
            return now_s >= ends_s - _LAST_RESORT_S
        if told_s is None:
            return False
        limit_s = _SILENCE_S + _CLOSING_STOPPED_S + _PYTHONS_END_S
        return now_s >= max(told_s, stuck_since_s) + limit_s

    @property
    def is_killed_at_known_time(self) -> bool:
        """True if somebody kills the process soon, and it is known when."""
        return self._is_to_be_killed and self._ends_s is not None

    @property
    def _ends_s(self) -> float | None:
        """The end of the grace period, by time.monotonic(), as the notice says that leaves the least time."""
        grace_s = self._grace_s
        if grace_s is None:
            return None
        limits_s = {PREEMPTED: _PREEMPTED_S, "sigterm": self._launcher_s}
        ends_s = []
        for notice in self._notices.notices:
            if not notice.kills:
                continue
            limit_s = limits_s.get(notice.source)
            ends_s.append(notice.monotonic_s + (grace_s if limit_s is None else min(grace_s, limit_s)))
        return min(ends_s, default=None)

    @property
    def _is_to_be_killed(self) -> bool:
        return self._kill_told_s is not None

    @property
    def _kill_told_s(self) -> float | None:
        """Time of the first notice behind which somebody kills the process soon; None if there is none yet.

        That need not be the first notice: Slurm may send SIGUSR1 long before SIGTERM, and another rank may have had
        its SIGTERM sooner.
        """
        told = [notice.monotonic_s for notice in self._notices.notices if notice.source in _KILLERS]
        return min(told, default=None)
