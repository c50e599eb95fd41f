"""Remember the failures of saves in the background until the train thread raises them."""

import threading
from collections.abc import Callable
from typing import Final, Protocol

from stepkeeper.coordination.waits import call_weakly
from stepkeeper.errors import (
    CompanionLostError,
    FencedError,
    ForeignStepsError,
    LogFormatError,
    LogGapError,
    NoticeDeadlineError,
    PeerLostError,
    RefusedError,
    SaveError,
    StepkeeperError,
)
from stepkeeper.loggers import logger
from stepkeeper_planners.errors import PlannerError

__all__ = ["SaveFailures"]

_log: Final = logger("stepkeeper")
_MAX_LOST_IN_A_ROW: Final = 2
_LASTING: Final = (
    FencedError,
    ForeignStepsError,
    LogFormatError,
    LogGapError,
    NoticeDeadlineError,
    PeerLostError,
    PlannerError,
    RefusedError,
)
"""Failures that another save would meet again, and the ends of the training. They are never tolerated."""


class EndAsFencedIf(Protocol):
    """Makes the process exit with the code for a lost root, if the method returns True at the process's end."""

    def __call__(self, is_lost: Callable[[], bool], *, is_pods: bool) -> None: ...


class SaveFailures:
    """Remember failures of saves, and decide which of them a later save recovers from. Any thread may call it.

    A later save recovers from the loss of one companion, and from full devices, where each save copies less. So it may
    from others, if that many in a row are tolerated. A fence is the error that another claim owns the root.
    """

    def __init__(self, tolerated: int = 0) -> None:
        self._tolerated: Final = tolerated
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        """The failure to raise, even if a later save succeeds."""

        self._unrecovered: BaseException | None = None
        """The failure of the newest save that has ended."""

        self._failed_in_a_row = 0
        self._lost_in_a_row = 0
        """The number of newest saves that have each lost a companion."""

        self._fence: FencedError | None = None
        self._on_fence: Callable[[FencedError], object] = lambda _fence: None
        self._is_pods = False
        self._had_root = False
        """True once this process has claimed the root."""

        self._is_closed = False
        self._end_as_fenced_if: EndAsFencedIf | None = None
        self._has_hook = False

    def on_fence(
        self, method: Callable[[FencedError], None], end_as_fenced_if: EndAsFencedIf, *, is_pods: bool
    ) -> None:
        """Call a method, held weakly, when a fence becomes known, in the thread that found it.

        `end_as_fenced_if`, called first, makes the process exit as fenced if `is_lost` returns True at its
        end. `is_pods`: the operator has given this root to this pod.
        """
        self._on_fence = call_weakly(method)
        self._end_as_fenced_if = end_as_fenced_if
        self._is_pods = is_pods

    @property
    def fence(self) -> FencedError | None:
        """The first error that showed that another claim owns the root; None if this one owns it again."""
        return self._fence

    def record_fence(self, fence: FencedError) -> None:
        """Note that another claim owns the root. The first such error is logged."""
        with self._lock:
            is_new = self._fence is None
            self._fence = self._fence or fence
        if is_new:
            _log.error("fenced, nothing more is saved here: %s", fence)
            if self._end_as_fenced_if is not None and not self._has_hook:
                # Once: at the process's end it calls `is_lost`, whatever has happened since.
                self._has_hook = True
                self._end_as_fenced_if(self.is_lost, is_pods=self._is_pods)
            # Not if the manager was dropped: the process may keep running until its last save has ended.
            self._on_fence(fence)

    def is_lost(self) -> bool:
        """Return True if this process has lost its root, and must not exit as if training were done.

        If a second root refuses this process, for example another job's, the training has lost nothing.
        """
        return self._fence is not None and (self._is_pods or (self._had_root and not self._is_closed))

    def forget_fence(self) -> None:
        """Forget the fence: this process has claimed the root."""
        with self._lock:
            self._fence = None
            self._had_root = True

    def close(self) -> None:
        """Let the process exit normally, because nothing more is saved here; unless the root is the pod's."""
        self._is_closed = True

    def record_outcome(self, failure: BaseException | None) -> None:
        """Note how the next save has ended: with `failure`, or with a commit."""
        if failure is None:
            self.forget_fence()
        fence: FencedError | None = None
        with self._lock:
            if failure is None:
                self._unrecovered = None
                self._failed_in_a_row = self._lost_in_a_row = 0
                return
            self._unrecovered = failure
            self._failed_in_a_row += 1
            self._lost_in_a_row = self._lost_in_a_row + 1 if isinstance(failure, CompanionLostError) else 0
            recovers = isinstance(failure, StepkeeperError) and failure.next_save_recovers
            recovers = recovers and self._lost_in_a_row < _MAX_LOST_IN_A_ROW
            if isinstance(failure, FencedError):
                fence = failure
            ends_training = not recovers and not self._tolerates(failure)
            # The saves that were in flight when the root was lost fail later, each in its own way.
            if ends_training and not isinstance(self._failure, FencedError):
                self._failure = failure
        if not recovers and not ends_training:
            text = "failed save %d of %d in a row that training continues after: %s"
            _log.warning(text, self._failed_in_a_row, self._tolerated, failure)
        if fence is not None:
            self.record_fence(fence)

    @property
    def may_retry(self) -> bool:
        """True if the newest save that has ended failed, and that is tolerated: the last step may still be saved."""
        return self._unrecovered is not None and self._tolerates(self._unrecovered)

    def _tolerates(self, failure: BaseException) -> bool:
        """Return True if training continues after `failure`. Ranks decide alike: they count the same saves."""
        few = self._failed_in_a_row <= self._tolerated
        return few and isinstance(failure, Exception) and not isinstance(failure, _LASTING)

    def pop_failure(self, *, newest: bool) -> BaseException | None:
        """Return the failure of a save since the last call, if there was one, and forget it.

        A failure that a later save recovers from is returned only with `newest`: then no later save comes.
        """
        with self._lock:
            failure = self._failure or (self._unrecovered if newest else None)
            self._failure = None
            if newest or failure is self._unrecovered:
                self._unrecovered = None
            return failure

    def raise_failure(self, *, newest: bool = False) -> None:
        """Raise the failure of a save in the background since the last call, if there was one.

        `newest`: no later save comes that could recover from a failure. Raises FencedError, PeerLostError or
        NoticeDeadlineError if that was the failure, else SaveError. The loss of a companion counts only if it
        happened twice in a row, or with `newest`; full devices count only with `newest`.
        """
        failure = self.pop_failure(newest=newest)
        if isinstance(failure, FencedError | PeerLostError | NoticeDeadlineError):
            raise failure
        if failure is not None:
            raise SaveError(f"a save in the background failed: {failure}") from failure

    def forget_failure(self, error: BaseException) -> None:
        """Forget `error`, which a caller has seen, on all ranks. The loss of the root or of a rank stays."""
        self.remember_fence(error)
        if isinstance(error, FencedError | PeerLostError):
            return
        with self._lock:
            self._failure = None if self._failure is error else self._failure
            self._unrecovered = None if self._unrecovered is error else self._unrecovered

    def remember_fence(self, error: BaseException) -> None:
        """Note `error`, which the caller of `result` has seen, if it shows that another claim owns the root."""
        if isinstance(error, FencedError):
            self.record_fence(error)
