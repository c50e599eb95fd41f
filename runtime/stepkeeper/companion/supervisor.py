"""Keep a companion process at hand: start one when it is first needed, and another when one was lost."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import ClaimedRoot, ClaimRequest, CloseRequest, Kind, OpenRequest
from stepkeeper.companion.origin import NextClaim, Origin, is_claim_from, set_claim_base
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import Directive
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import (
    ClosedError,
    FencedError,
    ForeignStepsError,
    RestoreError,
    StepkeeperError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.fork_guard import forget_in_forks
from stepkeeper.log import CommitRecord, ForeignBase
from stepkeeper.log.claims import must_branch
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.stacks.meeting import StackMeeting
from stepkeeper.stacks.sharing import StackRequest
from stepkeeper.stacks.stack_file import stack_file
from stepkeeper.time_limits import TimeLimits

__all__ = ["Companion", "Origin"]

_log: Final = logger(__name__)
_OPEN_TIMEOUT_S: Final = 60.0


class Companion:
    """Give the trainer a companion: its processes come and go, the claim of the root stays.

    The process ends soon after nobody holds this object any more, also without `close`. A save in flight holds it
    too.
    """

    def __init__(
        self,
        opening: OpenRequest,
        on_directive: Callable[[Directive], None],
        *,
        claiming: ClaimRequest | None = None,
        stack_meeting: StackMeeting | None = None,
        stacks_after_s: float | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        """Prepare a companion; no process is started yet.

        Args:
            opening: The first message to each process.
            on_directive: Called with each directive of the operator, in the thread that receives from the
                companion.
            claiming: The claim to make, without what it goes on from.
            stack_meeting: Where the companions of all ranks meet; None: nobody asks for stacks.
            stacks_after_s: Seconds that any step may take before the stacks of all ranks are dumped, if it also takes
                far longer than the ones before; None: steps aren't watched.
            limits: How long claims may take.

        """
        self._limits: Final = limits or TimeLimits()
        self._stack_meeting = stack_meeting
        self._stacks_after_millis = None if stacks_after_s is None else int(stacks_after_s * 1000)
        self._stack_address: Mapping[str, Any] | None = None
        self._opening = opening
        self._on_directive = on_directive
        self._claiming = claiming or ClaimRequest()
        self.choose_foreign_step: Callable[[], ForeignBase | None] = lambda: None
        """Called before a claim, in a root without a commit but with another writer's steps, to choose one to go on
        from.
        """

        self._lock = threading.Lock()
        self._process: CompanionProcess | None = None
        self._starting: CompanionProcess | None = None
        self._finalizer: weakref.finalize[[], Companion] | None = None
        self._closed = False
        self._is_start_given_up = False
        """True once `close` has stopped waiting for a process that another thread starts."""

        self._claimed_root: ClaimedRoot | None = None
        self._origin: Origin | None = None
        self._next_claim: NextClaim | None = None
        self._state = TrainerState()
        forget_in_forks(self)

    def forget_after_fork(self) -> None:
        """Forget the process, in a forked child: it is its parent's, and so is the claim."""
        self._lock = threading.Lock()
        self._closed = self._closed or self._process is not None or self._claimed_root is not None
        self._process = self._starting = None
        self._dismiss_when_dropped(None)

    @property
    def claimed_root(self) -> ClaimedRoot | None:
        """The claim of this process, once it has one."""
        return self._claimed_root

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
        """The newest failure after a commit: it isn't verified, or data that was to be deleted is still there."""
        process = self._process
        return None if process is None else process.complaint

    def ensure_process(self) -> CompanionProcess:
        """Return a running companion process, and start one if there is none.

        The process knows the root, the claim and the trainer's state. Work that takes several requests sends them
        all to one process: a new process knows nothing of it.

        Raises:
            CompanionLostError: The process went away while it started.
            FencedError: Another claim owns the root by now.
            ClosedError: This companion was closed.

        """
        with self._lock:
            if self._closed:
                raise ClosedError(
                    "the companion process was ended with its manager; construct another manager"
                )
            if self._process is not None and not self._process.lost:
                return self._process
            if self._process is not None:
                _log.warning("the companion process %d is gone; starting another one", self._process.pid)
                self._process.close()
                self._process = None
            self._process = self._start_process()
            self._dismiss_when_dropped(self._process)
            return self._process

    def _start_process(self) -> CompanionProcess:
        # If the next claim may be in the log already, requesting that one proves this one too.
        held = None if self._next_claim is not None else self._claimed_root
        claim = None if held is None else held.claim
        process = self._starting = CompanionProcess(self._on_directive)
        try:
            # In this order, because the thread that closes does both in the opposite one.
            if self._is_start_given_up:
                raise ClosedError(
                    "the companion process was ended while it started, as its manager was closed"
                )
            opening, fds = self._with_stacks(replace(self._opening, claim=claim))
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
        """Add to the opening how stacks are read, and return it with the descriptors to send along."""
        meeting = self._stack_meeting
        if meeting is None:
            return opening, ()
        try:
            file = stack_file()
        except (OSError, RuntimeError) as error:
            _log.warning("the stacks of this process's threads can't be had: %r", error)
            return opening, ()
        listening = meeting.listening_fds()
        request = StackRequest(
            signal=file.signal_number,
            least_millis=self._stacks_after_millis,
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
            # When the interpreter ends, the closed socket tells the process.
            self._finalizer.atexit = False

    def claim_root(
        self,
        *,
        origin: Origin | None = None,
        take_over: str | None = None,
        unrestored_step: int | None = None,
    ) -> ClaimedRoot:
        """Claim the root for this process, which goes on from `origin`; without an origin, from what HEAD is.

        A repeated call with the same origin returns the same claim. If `origin` is another one and isn't HEAD, this
        process makes a further claim, which follows its first. It also does so to begin a branch, once.

        Args:
            origin: What this process has restored; None if that is HEAD, or nothing.
            take_over: Name of the job whose root becomes this one's.
            unrestored_step: The step to save next, if this process hasn't restored all of what it saves. A branch
                begins with it unless it is greater than HEAD's.

        Raises:
            FencedError: The claim of this process didn't hold any more.

        """
        process = self._process_with_next_claim_made()
        if self._claimed_root is None:
            body = replace(self._claiming, take_over=take_over or self._claiming.take_over)
            self._claimed_root = self._request_first_claim(
                process, body if origin is None else set_claim_base(body, origin)
            )
            self._origin = origin
        elif origin is not None and origin is not self._origin:
            self._claimed_root = self._claim_next(process, origin)
        if unrestored_step is not None and not self._claimed_root.branching:
            found = self._claimed_root.base or self._claimed_root.legacy
            if must_branch(found, unrestored_step):
                self._claimed_root = self._claim_next(process, branch_step=unrestored_step)
        return self._claimed_root

    def claim_root_from(self, legacy: ForeignBase) -> ClaimedRoot:
        """Follow this process's claim, which held until now, by another one that goes on from `legacy`.

        Raises:
            FencedError: The claim didn't hold any more.

        """
        return self.claim_root(origin=Origin(legacy))

    def read_latest(self, *, take_over: str | None = None) -> CommitRecord | ForeignBase | None:
        """Return the commit, or another writer's step, that HEAD is at this moment.

        The root is claimed first, if this process hasn't claimed it yet.
        """
        if self._claimed_root is None:
            claimed = self.claim_root(take_over=take_over)
        else:
            claimed = self._request_claim(self._process_with_claim_known(), Kind.REFRESH, {})
        return claimed.base or claimed.legacy

    def _process_with_claim_known(self) -> CompanionProcess:
        """Return a running process after finding out whether the next claim, if one was requested, is in the log.

        If it isn't, it is not made any more and HEAD stays what it is: the caller only wants to know HEAD.
        """
        process = self.ensure_process()
        if (next_claim := self._next_claim) is not None:
            stays = replace(next_claim.body, base=None, legacy=None, branch=False)
            self._claimed_root = self._request_next_claim(process, replace(next_claim, body=stays))
        return process

    def _process_with_next_claim_made(self) -> CompanionProcess:
        """Return a running process after making the next claim, if one was requested."""
        process = self.ensure_process()
        if self._next_claim is not None:
            self._claimed_root = self._request_next_claim(process, self._next_claim)
        return process

    def _claim_next(
        self, process: CompanionProcess, origin: Origin | None = None, *, branch_step: int | None = None
    ) -> ClaimedRoot:
        """Follow this process's claim by one that goes on from `origin`, or that begins a branch with `branch_step`."""
        assert self._claimed_root is not None
        body = replace(self._claiming, after=self._claimed_root.claim, nonce=new_nonce())
        body = replace(body, branch=True) if origin is None else set_claim_base(body, origin)
        self._next_claim = NextClaim(body=body, origin=origin, branch_step=branch_step)
        try:
            return self._request_next_claim(process, self._next_claim)
        except StorageError as error:
            if not isinstance(error, TransientStorageError | UnknownOutcomeError):
                # The store refused the first put: the next claim can't be in the log.
                self._next_claim = None
            raise

    def _request_next_claim(self, process: CompanionProcess, next_claim: NextClaim) -> ClaimedRoot:
        try:
            claimed = self._request_claim(process, Kind.CLAIM, encode(next_claim.body))
        except (FencedError, RestoreError):
            # The next claim isn't in the log, and is given up.
            self._next_claim = None
            raise
        self._next_claim = None
        if next_claim.origin is not None and is_claim_from(claimed, next_claim.origin):
            self._origin = next_claim.origin
        if next_claim.branch_step is not None and claimed.branching:
            _warn_of_branch(claimed, next_claim.branch_step)
        return claimed

    def _request_first_claim(self, process: CompanionProcess, body: ClaimRequest) -> ClaimedRoot:
        try:
            return self._request_claim(process, Kind.CLAIM, encode(body))
        except ForeignStepsError:
            # Only a process with torch, this one, can read what another writer's step holds.
            body = replace(body, offer=self.choose_foreign_step())
            return self._request_claim(process, Kind.CLAIM, encode(body))

    def _request_claim(self, process: CompanionProcess, kind: Kind, body: dict[str, Any]) -> ClaimedRoot:
        """Send a request that the companion answers with the claim, and measure how long that takes."""
        began_s = time.monotonic()
        answer = process.send_request(kind, body, timeout_s=self._limits.claim_s)
        self._limits.record_claim(time.monotonic() - began_s)
        return decode(ClaimedRoot, answer)

    def report_state(self, state: TrainerState) -> None:
        """Carry `state` in reports from here on."""
        self._state = state
        process = self._process
        if process is not None and not process.lost:
            process.send_state(Kind.STATE, encode(state))

    def close(self, limit_s: float) -> None:
        """End the process within `limit_s` seconds, and start no other.

        The work after the last commits is done and the last report is answered, if that is possible in time.
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
        """Take over the current process.

        A process that another thread is starting, and that doesn't come up in time, is killed, now or by that thread.
        """
        self._closed = True
        is_idle = self._lock.acquire(timeout=patience_s)
        if not is_idle:
            self._is_start_given_up = True
            if (starting := self._starting) is not None:
                starting.kill()
            is_idle = self._lock.acquire(timeout=patience_s)
        if not is_idle:
            _log.warning("the companion process is still being started; it is ended once it is there")
            return None
        try:
            process, self._process = self._process, None
            self._dismiss_when_dropped(None)
            if self._stack_meeting is not None:
                self._stack_meeting.close()
            return process
        finally:
            self._lock.release()


def _warn_of_branch(claimed: ClaimedRoot, step: int) -> None:
    latest = claimed.base or claimed.legacy
    assert latest is not None
    _log.warning(
        "step %d begins a branch of its own: this process hasn't restored all of the state that it saves, and this "
        "root is at step %d already (%s). To go on from there, call restore_latest(state), with this same state and "
        "all of it, before the first save; for another training, use another root. What was saved there before stays, "
        "until this branch has passed its steps",
        step,
        latest.step,
        latest.folder,
        extra={"step": step},
    )
