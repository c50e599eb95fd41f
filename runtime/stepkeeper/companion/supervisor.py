"""Keep a companion process running: start one when it is first needed, and another one after a loss."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from typing_extensions import override

from stepkeeper.companion.claiming import Origin, RootClaims
from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import ClaimRequest, CloseRequest, Kind, OpenRequest
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import Directive
from stepkeeper.contract.wire import encode
from stepkeeper.errors import ClosedError, StepkeeperError
from stepkeeper.fork_guard import forget_in_forks
from stepkeeper.loggers import logger
from stepkeeper.stacks.meeting import StackMeeting
from stepkeeper.stacks.pace import PaceLimits
from stepkeeper.stacks.reading import StackRequest
from stepkeeper.stacks.stack_file import stack_file

__all__ = ["Companion", "Origin"]

_log: Final = logger(__name__)
_OPEN_TIMEOUT_S: Final = 60.0


class Companion(RootClaims):
    """Run one trainer's companion processes, one after another, and make its claims through them.

    The process ends soon after the last reference to this object is gone, even without `close`. A save in flight holds
    a reference too.
    """

    def __init__(
        self,
        opening: OpenRequest,
        on_directive: Callable[[Directive], None],
        *,
        claiming: ClaimRequest | None = None,
        stack_meeting: StackMeeting | None = None,
        pace_limits: PaceLimits | None = None,
    ) -> None:
        """Store the arguments; no process is started yet.

        Args:
            opening: The first message to each process.
            on_directive: Called with each directive of the operator, in the receiving thread.
            claiming: The first claim to make, without its base.
            stack_meeting: Where the companions of all ranks meet; None if stacks aren't read.
            pace_limits: When a step, or a stage between steps, takes so long that the stacks of all ranks are dumped.
                None: never.
        """
        super().__init__(claiming or ClaimRequest())
        self._stack_meeting = stack_meeting
        self._pace_limits = pace_limits or PaceLimits()
        self._stack_address: Mapping[str, Any] | None = None
        self._opening = opening
        self._on_directive = on_directive
        self._lock = threading.Lock()
        self._process: CompanionProcess | None = None
        self._starting: CompanionProcess | None = None
        self._finalizer: weakref.finalize[[], Companion] | None = None
        self._closed = False
        self._is_start_given_up = False
        """True once `close` has stopped waiting for a process that another thread is starting."""

        self._state = TrainerState()
        forget_in_forks(self)

    def forget_after_fork(self) -> None:
        """Forget the process in a forked child: it is the parent's, and so is the claim."""
        self._lock = threading.Lock()
        self._closed = self._closed or self._process is not None or self.claimed_root is not None
        self._process = self._starting = None
        self._dismiss_when_dropped(None)

    @property
    def has_tier(self) -> bool:
        """True if saves go through a local disk."""
        return self._opening.tier is not None

    @property
    def pid(self) -> int | None:
        """Process id of the companion; None if no process runs."""
        process = self._process
        return None if process is None or process.lost else process.pid

    @property
    def complaint(self) -> str | None:
        """The newest failure of the upkeep after a commit; None after a success."""
        process = self._process
        return None if process is None else process.complaint

    @override
    def ensure_process(self) -> CompanionProcess:
        """Return the running companion process, and start one if there is none.

        A new one has the root, the claim and the trainer's state, but no earlier request: send related ones to the same
        process. Raises CompanionLostError if it is lost while it starts, FencedError, and ClosedError after `close`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the companion process ended with its manager; construct another manager")
            if self._process is not None and not self._process.lost:
                return self._process
            if self._process is not None:
                _log.warning("the companion process %d is gone; starting another one", self._process.pid)
                self._process.close()
                self._process = None
            self._process = self._start_process()
            self._dismiss_when_dropped(self._process)
            return self._process

    def start_early(self) -> None:
        """Start a process in another thread, if there is none: that takes a while. `ensure_process` waits for it."""

        def start() -> None:
            with suppress(Exception):  # the call that needs the process raises it
                self.ensure_process()

        threading.Thread(target=start, name="companion-start", daemon=True).start()

    def _start_process(self) -> CompanionProcess:
        process = self._starting = CompanionProcess(self._on_directive)
        try:
            # After `_starting` is set: the closing thread first gives the start up, then kills `_starting`.
            if self._is_start_given_up:
                text = "the companion process was ended during its start, because its manager was closed"
                raise ClosedError(text)
            opening, fds = self._with_stacks(replace(self._opening, claim=self._held_claim))
            process.send_request(Kind.OPEN, encode(opening), fds=fds, timeout_s=_OPEN_TIMEOUT_S)
            process.send_state(Kind.STATE, encode(self._state))
            if self._stack_address is not None:
                process.send_state(Kind.LINK, self._stack_address)
        except BaseException:
            process.close()
            raise
        finally:
            self._starting = None
        return process

    def _with_stacks(self, opening: OpenRequest) -> tuple[OpenRequest, tuple[int, ...]]:
        """Return the opening with a request for stacks, and the descriptors to send along."""
        meeting = self._stack_meeting
        if meeting is None:
            return opening, ()
        try:
            file = stack_file()
        except (OSError, RuntimeError) as error:
            _log.warning("the stacks of this process's threads can't be read: %r", error)
            return opening, ()
        listening = meeting.listening_fds()
        request = StackRequest(
            signal=file.signal_number,
            limits=self._pace_limits,
            secret=meeting.secret if listening else None,
        )
        return replace(opening, stacks=request), (file.fd, *listening)

    def link_stacks(self, address: Mapping[str, Any]) -> None:
        """Connect this rank's companion with rank 0's, which is at `address`."""
        self._stack_address = address
        process = self._process
        if process is not None and not process.lost:
            process.send_state(Kind.LINK, address)

    def _dismiss_when_dropped(self, process: CompanionProcess | None) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = None if process is None else weakref.finalize(self, process.dismiss)
        if self._finalizer is not None:
            # When the interpreter ends, the closed socket ends the process.
            self._finalizer.atexit = False

    def report_state(self, state: TrainerState) -> None:
        """Carry `state` in reports from here on."""
        self._state = state
        process = self._process
        if process is not None and not process.lost:
            process.send_state(Kind.STATE, encode(state))

    def close(self, limit_s: float) -> None:
        """End the process within `limit_s` seconds, and start no other.

        If the time allows, the upkeep after the last commits is done and the last report is answered.

        Shares of the limit: up to a half to get hold of a process that is starting. Of the rest, 60 % for the process's
        work, 75 % for its answer, and what is left for its end.
        """
        ends_s = time.monotonic() + limit_s
        process = self._take_last_process(limit_s / 4)
        if process is None:
            return
        left_s = max(0.0, ends_s - time.monotonic())
        try:
            if not process.lost:
                closing = CloseRequest(within_millis=int(left_s * 600))
                process.send_request(
                    Kind.CLOSE, encode(closing), timeout_s=left_s * 3 / 4, kill_timeout_s=left_s / 8
                )
        except StepkeeperError as error:
            _log.warning("the last report may not have been sent: %s", error)
        finally:
            process.close(max(0.0, ends_s - time.monotonic()))

    def _take_last_process(self, patience_s: float) -> CompanionProcess | None:
        """Take over the current process. One that isn't ready in time is killed, here or in its thread."""
        self._closed = True
        # The thread that starts a process holds the lock.
        has_lock = self._lock.acquire(timeout=patience_s)
        if not has_lock:
            self._is_start_given_up = True
            if (starting := self._starting) is not None:
                starting.kill()
            has_lock = self._lock.acquire(timeout=patience_s)
        if not has_lock:
            _log.warning("the companion process is still starting; it is ended once it has started")
            return None
        try:
            process, self._process = self._process, None
            self._dismiss_when_dropped(None)
            if self._stack_meeting is not None:
                self._stack_meeting.close()
            return process
        finally:
            self._lock.release()
