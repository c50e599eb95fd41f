"""Remember how saves in the background failed until the train thread asks."""

import threading
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakMethod

from stepkeeper.errors import (
    CompanionLostError,
    FencedError,
    NoticeDeadlineError,
    PeerLostError,
    SaveError,
    StepkeeperError,
)
from stepkeeper.loggers import logger

__all__ = ["SaveFailures"]

_log: Final = logger("stepkeeper")
_MAX_LOST_IN_A_ROW: Final = 2


class EndAsFencedIf(Protocol):
    """A function that lets the process end as fenced if a method returns True when it ends."""

    def __call__(self, is_lost: Callable[[], bool], *, is_pods: bool) -> None: ...


class SaveFailures:
    """Remember failures of saves, and judge which of them a later save makes good. Any thread may call it.

    A later save makes good the loss of one companion. It makes good full devices too, because each save copies less
    there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        """The failure to raise, whatever comes after it."""

        self._unrecovered: BaseException | None = None
        """The failure of the newest save that has ended."""

        self._lost_in_a_row = 0
        self._fence: FencedError | None = None
        self._tell: WeakMethod[Callable[[FencedError], None]] | None = None
        self._is_pods = False
        self._had_root = False
        """True once this process has claimed the root."""

        self._is_closed = False
        self._end_as_fenced_if: EndAsFencedIf | None = None
        self._has_hook = False

    def on_fence(
        self, tell: Callable[[FencedError], None], end_as_fenced_if: EndAsFencedIf, *, is_pods: bool
    ) -> None:
        """Call a method when a fence becomes known, in the thread that found it.

        Args:
            tell: The method; its object is held weakly.
            end_as_fenced_if: Called first; it lets the process end as fenced if `is_lost` when it ends.
            is_pods: True if the root is the one that the operator has given to this pod: a process that loses it, or
                isn't let in, must not end as if training were done.

        """
        self._tell = WeakMethod(tell)
        self._end_as_fenced_if = end_as_fenced_if
        self._is_pods = is_pods

    @property
    def fence(self) -> FencedError | None:
        """The first error that told that another claim owns the root.

        No later save makes it good, unless that claim was one of another job's, and the root was freed since.
        """
        return self._fence

    def record_fence(self, fence: FencedError) -> None:
        """Note that another claim owns the root. The first such error is logged."""
        with self._lock:
            is_new = self._fence is None
            self._fence = self._fence or fence
        if is_new:
            _log.error("fenced, nothing more is saved here: %s", fence)
            if self._end_as_fenced_if is not None and not self._has_hook:
                self._has_hook = True
                self._end_as_fenced_if(self.is_lost, is_pods=self._is_pods)
            # Gone if the manager was dropped: the process may go on until its last save has ended.
            tell = None if self._tell is None else self._tell()
            if tell is not None:
                tell(fence)

    def is_lost(self) -> bool:
        """Return True if this process must not end as if training were done: it has lost its root.

        A root beside the training's that refuses this process, as another job's does, is no loss of the training.
        """
        return self._fence is not None and (self._is_pods or (self._had_root and not self._is_closed))

    def forget_fence(self) -> None:
        """Forget the fence: this process has claimed the root."""
        with self._lock:
            self._fence = None
            self._had_root = True

    def close(self) -> None:
        """Let the process end as it may once nothing is saved here any more, unless the root is the pod's."""
        self._is_closed = True

    def record_outcome(self, failure: BaseException | None) -> None:
        """Note how the next save has ended: with `failure`, or with a commit."""
        if failure is None:
            self.forget_fence()
        fence: FencedError | None = None
        with self._lock:
            if failure is None:
                self._unrecovered = None
                self._lost_in_a_row = 0
                return
            self._unrecovered = failure
            self._lost_in_a_row = self._lost_in_a_row + 1 if isinstance(failure, CompanionLostError) else 0
            mends = isinstance(failure, StepkeeperError) and failure.next_save_mends
            if isinstance(failure, FencedError):
                fence = failure
            ends = not mends or self._lost_in_a_row >= _MAX_LOST_IN_A_ROW
            # The saves that were in flight when the root was lost fail after that, each in its own way.
            if ends and not isinstance(self._failure, FencedError):
                self._failure = failure
        if fence is not None:
            self.record_fence(fence)

    def pop_failure(self, *, newest: bool) -> BaseException | None:
        """Return the failure of a save since the last call, if there was one, and forget it.

        A failure that a later save makes good isn't returned unless `newest` says that no later save comes.
        """
        with self._lock:
            failure = self._failure or (self._unrecovered if newest else None)
            self._failure = None
            if newest or failure is self._unrecovered:
                self._unrecovered = None
            return failure

    def raise_failure(self, *, newest: bool = False) -> None:
        """Raise the failure of a save in the background since the last call, if there was one.

        Args:
            newest: True if no later save comes that could make a failure good.

        Raises:
            FencedError: A save failed because another claim owns the root.
            PeerLostError: A save failed because another rank is lost.
            NoticeDeadlineError: A save failed because the time of a notice was over.
            SaveError: A save failed for another reason. The loss of a companion counts only if it happened twice in
                a row, or with `newest`; full devices count only with `newest`.

        """
        failure = self.pop_failure(newest=newest)
        if isinstance(failure, FencedError | PeerLostError | NoticeDeadlineError):
            raise failure
        if failure is not None:
            raise SaveError(f"a save in the background failed: {failure}") from failure

    def forget_failure(self, error: BaseException) -> None:
        """Forget the failure: the caller of `result` has seen `error`. The loss of the root or of a rank stays.

        Ranks: all ranks call this, or none.
        """
        self.remember_fence(error)
        if isinstance(error, FencedError | PeerLostError):
            return
        with self._lock:
            self._failure = None if self._failure is error else self._failure
            self._unrecovered = None if self._unrecovered is error else self._unrecovered

    def remember_fence(self, error: BaseException) -> None:
        """Note `error`, which the caller of `result` has seen, if it tells that another claim owns the root."""
        if isinstance(error, FencedError):
            self.record_fence(error)
