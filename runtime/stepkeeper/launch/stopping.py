"""Hand the signals that come to the launcher on to its command, and know when that has had its time to stop."""

import math
import signal
import time
from collections.abc import Callable
from typing import Final

from stepkeeper.launch.ranks import Rank, children_of, find_ranks, send_signal

__all__ = ["Stop"]

_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that ask for an end; Kubernetes sends SIGTERM, or the one that the image or the container names."""

_LOOK_AT_RANKS_S: Final = 0.02
"""torchrun looks at its processes ten times a second, and may start them anew when it finds that one has ended."""

_TORCHRUNS_END_S: Final = 5.0
"""Seconds that torchrun has for its own end behind its last rank's. On a busy machine that may take longer than the pod
has left, and the pod would end with the kernel's code in place of the training's.
"""

_MARGIN_S: Final = 0.15
"""Seconds before the kubelet's SIGKILL in which the launcher still has to end with the training's code. The training's
processes end themselves 0.3 s before it.
"""


class Stop:
    """Stop the command. The ranks of a torchrun are told first, torchrun itself when the first of them has ended."""

    def __init__(self, pid: int, grace_s: float, may_leave: Callable[[], bool]) -> None:
        """Tell nobody yet.

        Args:
            pid: The command's process.
            grace_s: Seconds from the first signal that asks for an end until whoever sent it kills all processes.
            may_leave: That of `run`.

        """
        self._pid = pid
        self._time_s = grace_s - _MARGIN_S
        self._may_leave = may_leave
        self._came_s: dict[int, float] = {}
        self._ranks: tuple[Rank, ...] = ()
        self._is_torchrun = False
        """True if the command has started the ranks itself. What a shell does behind its torchrun is waited for."""
        self._command_is_told = False
        self._leave_s = math.inf
        """When the command is told in any case, and left if it may be, by time.monotonic()."""
        self._is_asked = False
        """True if `may_leave` has been asked: once is enough."""

    @property
    def ends_s(self) -> float:
        """When all that the command has left behind has had its time, by time.monotonic()."""
        return min(self._came_s.values(), default=math.inf) + self._time_s

    def was_told(self, *signals: int) -> bool:
        """Return True if one of these signals, or of all those that ask for an end, has come."""
        return any(signum in self._came_s for signum in signals or _STOPS)

    def note(self, signum: int) -> None:
        """Note that a signal has come, and hand it on to nobody."""
        if signum in _STOPS:
            self._came_s.setdefault(signum, time.monotonic())

    def hear(self, signum: int) -> None:
        """Note a signal and hand it on. The first one of a kind counts for the time that is left."""
        self.note(signum)
        if signum != signal.SIGTERM:
            send_signal(self._pid, signum)
            return
        if not self._tell_ranks():
            self._command_is_told = True
            send_signal(self._pid, signal.SIGTERM)
        self._leave_s = min(self._leave_s, self._came_s[signum] + self._time_s)

    @property
    def look_s(self) -> float:
        """The time until `is_over` has to be asked again."""
        return math.inf if self._is_asked or self._leave_s == math.inf else _LOOK_AT_RANKS_S

    def is_over(self) -> bool:
        """Do what it is time for. Return True if the command isn't waited for any longer."""
        if self._is_asked or self._leave_s == math.inf:
            return False
        now_s = time.monotonic()
        ended = [rank.has_ended for rank in self._ranks]
        if not self._command_is_told and (now_s >= self._leave_s or any(ended)):
            self._command_is_told = True
            send_signal(self._pid, signal.SIGTERM)
        if self._is_torchrun and all(ended):
            self._leave_s = min(self._leave_s, now_s + _TORCHRUNS_END_S)
        if now_s < self._leave_s:
            return False
        self._is_asked = True
        return self._may_leave()

    def _tell_ranks(self) -> bool:
        """Tell the ranks below the command. Return False if there are none, or one that doesn't heed it yet."""
        if self._ranks:
            return True
        ranks = find_ranks(self._pid)
        if not ranks or not all(rank.heeds_sigterm for rank in ranks):
            return False
        self._ranks = ranks
        self._is_torchrun = {rank.pid for rank in ranks} <= set(children_of(self._pid))
        for rank in ranks:
            rank.tell()
        return True
