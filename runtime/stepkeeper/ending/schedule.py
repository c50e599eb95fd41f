"""Schedule the end of a process: the time that notices leave to each part of it. Pure: the time now is a field.

If the kill's time is known (a pod's grace period, 15 s for a preemption, 30 s under torchrun), in seconds before it:

| s    | what has ended by then |
| ---- | --- |
| 1.5  | waits and saves (`END_RESERVE_S`), each in 60 s at most, or in 10 s where other ranks may have ended already |
| 0.6  | the manager: reports, threads, the companion; earlier if the save ended earlier |
| 0.3  | the process, with its exit code, wherever its threads are |
| 0.15 | the same where no Python code can run; the launcher |

If it isn't known (no operator, no torchrun), in seconds after the notice or a save's last progress: 22 for waits and
saves, 4 more for the manager, 1 more for the process. A stop that no kill follows (a directive, a call) has no limit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from stepkeeper.contract import END_RESERVE_S, LAUNCHER_VARIABLE, TORCHRUN_VARIABLE, NoticeSource

__all__ = ["ENDS_APART_S", "END_WAIT_S", "LOSS_KNOWN_S", "Notice", "Schedule", "launcher_grace_s"]

END_WAIT_S: Final = 60.0
"""Seconds for each wait at the end: for ranks that reach the stop step later, for hooks, for saves in flight."""

ENDS_APART_S: Final = 10.0
"""The same if other ranks may have ended already: after an exception, or if programs end themselves after a notice."""

LOSS_KNOWN_S: Final = 1.0
"""Seconds in which the loss of a rank becomes known after a collective failed because of it."""

_PREEMPTED_S: Final = 15.0
"""A preempted machine is gone after 30 s, and GKE's kubelet reserves half of that for system pods."""

_TORCHRUN_S: Final = 30.0
"""Seconds after which torchrun kills its processes once it has sent them SIGTERM."""

_CLOSING_S: Final = 9.0
"""Seconds that a manager has to close, without a notice."""

_CLOSING_STOPPED_S: Final = 4.0
"""The same after a notice."""

_CLOSING_LATE_S: Final = 0.9
"""The same if the kill is near: a part of END_RESERVE_S."""

_LAST_RESORT_S: Final = 0.3
"""Seconds before the kill at which a process that is stuck is ended."""

_SILENCE_S: Final = 22.0
"""Seconds for waits and saves if the kill's time isn't known. Kubernetes and Slurm kill after 30 s by default."""

_PYTHONS_END_S: Final = 1.0
"""Seconds that the interpreter has to end once the manager is closed."""

_START_S: Final = 10.0
"""Seconds after a notice in which all ranks have to start. Before that there is nothing to save, and a rank that builds
its model may take longer than any grace period.
"""

_START_BEFORE_RANK_0_S: Final = 8.0
"""The same for ranks other than rank 0. They leave first, since their common store is in rank 0's process."""

_KILLERS: Final = (NoticeSource.SIGTERM, NoticeSource.FILE, NoticeSource.PREEMPTED)
"""Sources of notices after which this process is killed. After the notice of a peer (another rank), that one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A request to save and stop."""

    source: NoticeSource

    monotonic_s: float
    """Time of the notice (time.monotonic())."""

    kills: bool = True
    """False if no kill follows: the program or the operator asked for the stop."""


def launcher_grace_s(environ: Mapping[str, str]) -> float:
    """Return the seconds from SIGTERM until this process's launcher kills it; infinity if it never does.

    With stepkeeper's own launcher, torchrun gets SIGTERM after its processes have ended.
    """
    return _TORCHRUN_S if TORCHRUN_VARIABLE in environ and LAUNCHER_VARIABLE not in environ else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The time limits of one process at `now_s`, by its notices so far. All times are of time.monotonic()."""

    grace_s: float | None
    """Seconds from a notice until the process is killed; None if unknown, as without an operator."""

    launcher_s: float = math.inf
    """Seconds from SIGTERM until the process's launcher kills it; infinity if it never does."""

    rank: int = 0
    notices: tuple[Notice, ...] = ()
    now_s: float = 0.0
    is_starting: bool = False
    """True until all ranks have started."""

    def with_notice(self, notice: Notice) -> Self:
        """Return this schedule with one more notice. Only the first of each source counts."""
        if any(earlier.source == notice.source for earlier in self.notices):
            return self
        return replace(self, notices=(*self.notices, notice))

    @property
    def killer_s(self) -> float | None:
        """Time of the first notice after which this process is killed; None without one.

        It may not be the first notice: Slurm may send SIGUSR1 long before SIGTERM, and a peer may get SIGTERM earlier.
        """
        came_s = (notice.monotonic_s for notice in self.notices if notice.source in _KILLERS)
        return min(came_s, default=None)

    @property
    def kill_s(self) -> float | None:
        """Time of the kill, by the notice that leaves the least time; None without one, or if unknown."""
        if self.grace_s is None:
            return None
        limits_s = {NoticeSource.PREEMPTED: _PREEMPTED_S, NoticeSource.SIGTERM: self.launcher_s}
        kills = (notice for notice in self.notices if notice.kills)
        times_s = (
            each.monotonic_s + min(self.grace_s, limits_s.get(each.source, math.inf)) for each in kills
        )
        return min(times_s, default=None)

    @property
    def left_s(self) -> float | None:
        """The seconds left for saves; None without a notice that kills, or if the kill's time isn't known."""
        return None if self.kill_s is None else max(0.0, self.kill_s - END_RESERVE_S - self.now_s)

    def bound_s(self, limit_s: float) -> float:
        """Return `limit_s`, or the seconds left for saves if they are fewer."""
        return limit_s if self.left_s is None else min(limit_s, self.left_s)

    def wait_left_s(self, progress_s: float) -> float | None:
        """Return the seconds left to a wait whose start or last progress was at `progress_s`; None: no limit.

        A known kill time ends all waits. Otherwise a wait continues as long as a save makes progress.
        """
        limits_s = [self.left_s]
        # The kill may come at any time: a wait without progress isn't worth it.
        if self.grace_s is None and self.killer_s is not None:
            limits_s.append(max(self.killer_s, progress_s) + _SILENCE_S - self.now_s)
        came_s = min((notice.monotonic_s for notice in self.notices if notice.kills), default=None)
        if self.is_starting and came_s is not None:
            start_s = _START_S if self.rank == 0 else _START_BEFORE_RANK_0_S
            limits_s.append(came_s + start_s - self.now_s)
        return min((max(0.0, each) for each in limits_s if each is not None), default=None)

    @property
    def closing_timeout_s(self) -> float:
        """The seconds that the manager has to close, with its last report and all waits."""
        if self.left_s is None:  # no kill follows, or its time isn't known
            return _CLOSING_S if self.killer_s is None else _CLOSING_STOPPED_S
        return min(_CLOSING_STOPPED_S, self.left_s + _CLOSING_LATE_S)

    @property
    def end_left_s(self) -> float | None:
        """The seconds that the process has to end; None if no kill follows."""
        if self.kill_s is not None:
            return max(0.0, self.kill_s - _LAST_RESORT_S - self.now_s)
        return None if self.killer_s is None else self.closing_timeout_s + _PYTHONS_END_S

    def is_overdue(self, stuck_since_s: float) -> bool:
        """Return True if the process, stuck in a call since `stuck_since_s`, is about to be killed."""
        if self.kill_s is not None:
            return self.now_s >= self.kill_s - _LAST_RESORT_S
        if self.killer_s is None:
            return False
        limit_s = _SILENCE_S + _CLOSING_STOPPED_S + _PYTHONS_END_S
        return self.now_s >= max(self.killer_s, stuck_since_s) + limit_s
