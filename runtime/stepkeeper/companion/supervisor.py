"""Keeps a companion process at hand: started when first needed, and again after one was lost."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Begin, Begun, Close, Kind, Open
from stepkeeper.companion.origin import NextClaim, Origin, goes_on_from, with_origin
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import Directive
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import (
    ClosedError,
    FencedError,
    LegacyRootError,
    RestoreError,
    StepkeeperError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import CommitRecord, LegacyBase
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger

__all__ = ["Companion", "Origin"]

_log: Final = logger(__name__)
_OPEN_TIMEOUT_S: Final = 60.0
_KILL_AGAIN_S: Final = 0.05


class Companion:
    """The companion as the trainer sees it: its processes come and go, the claim stays.

    Its process ends soon after whoever has it drops it, also without `close`; a save in flight has it too.
    """

    def __init__(
        self, opening: Open, on_directive: Callable[[Directive], None], *, claiming: Begin | None = None
    ) -> None:
        """`claiming` is what the root is claimed with, but for its base."""
        self._opening = opening
        self._on_directive = on_directive
        self._claiming = claiming or Begin()
        self.choose_legacy: Callable[[], LegacyBase | None] = lambda: None
        """Asked, before a claim, for another writer's step to go on from, where there are such and no commit."""

        self._lock = threading.Lock()
        self._process: CompanionProcess | None = None
        self._starting: CompanionProcess | None = None
        self._finalizer: weakref.finalize[[], Companion] | None = None
        self._closed = False
        self._begun: Begun | None = None
        self._origin: Origin | None = None
        self._next_claim: NextClaim | None = None
        self._state = TrainerState()

    @property
    def begun(self) -> Begun | None:
        """The claim of this process, once it has one."""
        return self._begun

    @property
    def has_tier(self) -> bool:
        """Whether saves come by a local disk."""
        return self._opening.tier is not None

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.lost else process.pid

    @property
    def complaint(self) -> str | None:
        """What went wrong after a commit: it isn't verified, or what was to go is still there."""
        process = self._process
        return None if process is None else process.complaint

    def ensure_process(self) -> CompanionProcess:
        """A running companion process that knows the root, the claim and the trainer's state.

        A piece of work that needs several requests makes them all of one process: a new one knows nothing of it.

        Raises:
            CompanionLostError: it went away while it started.
            FencedError: another claim owns the root by now.
            ClosedError: there will be no process any more.

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
        # One that may have been followed by another is proven with that one.
        held = None if self._next_claim is not None else self._begun
        claim = None if held is None else held.claim
        process = self._starting = CompanionProcess(self._on_directive)
        try:
            process.send_request(
                Kind.OPEN, encode(replace(self._opening, claim=claim)), timeout_s=_OPEN_TIMEOUT_S
            )
            process.send_state(Kind.STATE, encode(self._state))
        except BaseException:
            process.close()
            raise
        finally:
            self._starting = None
        return process

    def _dismiss_when_dropped(self, process: CompanionProcess | None) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = None if process is None else weakref.finalize(self, process.dismiss)
        if self._finalizer is not None:
            # When the interpreter ends, the socket's end tells the process.
            self._finalizer.atexit = False

    def claim_root(self, *, origin: Origin | None = None, take_over: str | None = None) -> Begun:
        """The root is claimed by this process, which goes on from `origin`; without one, from what HEAD is.

        Asked again for the same, the same claim is the answer. For another origin, which isn't HEAD, the claim is
        followed by another one of this process. Raises FencedError if it didn't hold any more.
        """
        process = self._process_with_next_claim_made()
        if self._begun is None:
            body = replace(self._claiming, take_over=take_over or self._claiming.take_over)
            self._begun = self._request_first_claim(
                process, body if origin is None else with_origin(body, origin)
            )
            self._origin = origin
        elif origin is not None and origin is not self._origin:
            self._begun = self._claim_next(process, origin)
        return self._begun

    def claim_root_from(self, legacy: LegacyBase) -> Begun:
        """The claim of this process, which held until now, is followed by another one that goes on from `legacy`.

        Raises FencedError if it didn't hold any more.
        """
        return self.claim_root(origin=Origin(legacy))

    def read_latest(self, *, take_over: str | None = None) -> CommitRecord | LegacyBase | None:
        """What HEAD means at this moment. The root is claimed by this process, if it wasn't before."""
        if self._begun is None:
            begun = self.claim_root(take_over=take_over)
        else:
            begun = decode(Begun, self._process_with_claim_known().send_request(Kind.REFRESH, {}))
        return begun.base or begun.legacy

    def _process_with_claim_known(self) -> CompanionProcess:
        """A running process. Whether the claim was followed by another one is known, and won't change any more.

        Where that wasn't put, HEAD stays what it is: whoever wants to know it has asked for nothing else.
        """
        process = self.ensure_process()
        if (next_claim := self._next_claim) is not None:
            stays = replace(next_claim.body, base=None, legacy=None)
            self._begun = self._request_next_claim(process, replace(next_claim, body=stays))
        return process

    def _process_with_next_claim_made(self) -> CompanionProcess:
        """A running process, and a claim that was to be followed by another one is."""
        process = self.ensure_process()
        if self._next_claim is not None:
            self._begun = self._request_next_claim(process, self._next_claim)
        return process

    def _claim_next(self, process: CompanionProcess, origin: Origin) -> Begun:
        assert self._begun is not None
        body = replace(self._claiming, after=self._begun.claim, nonce=new_nonce())
        self._next_claim = NextClaim(body=with_origin(body, origin), origin=origin)
        try:
            return self._request_next_claim(process, self._next_claim)
        except StorageError as error:
            if not isinstance(error, TransientStorageError | UnknownOutcomeError):
                # Refused at its first put: nothing of it can be there.
                self._next_claim = None
            raise

    def _request_next_claim(self, process: CompanionProcess, next_claim: NextClaim) -> Begun:
        try:
            begun = decode(Begun, process.send_request(Kind.BEGIN, encode(next_claim.body)))
        except (FencedError, RestoreError):
            # It was not put, and isn't to be any more.
            self._next_claim = None
            raise
        self._next_claim = None
        if goes_on_from(begun, next_claim.origin):
            self._origin = next_claim.origin
        return begun

    def _request_first_claim(self, process: CompanionProcess, body: Begin) -> Begun:
        try:
            return decode(Begun, process.send_request(Kind.BEGIN, encode(body)))
        except LegacyRootError:
            # What another writer's step holds is for a process with torch to tell.
            body = replace(body, offer=self.choose_legacy())
            return decode(Begun, process.send_request(Kind.BEGIN, encode(body)))

    def report_state(self, state: TrainerState) -> None:
        """Reports carry `state` from here on."""
        self._state = state
        process = self._process
        if process is not None and not process.lost:
            process.send_state(Kind.STATE, encode(state))

    def close(self, limit_s: float) -> None:
        """The process has ended within `limit_s`, and there will be no other.

        What comes after the last commits is done and the last report was answered, if that was possible in time.
        """
        ends_s = time.monotonic() + limit_s
        process = self._take_last_process(limit_s / 2)
        if process is None:
            return
        left_s = max(0.0, ends_s - time.monotonic())
        try:
            if not process.lost:
                closing = Close(within_millis=int(left_s * 600))
                process.send_request(Kind.CLOSE, encode(closing), timeout_s=left_s * 3 / 4)
        except StepkeeperError as error:
            _log.warning("the last report may not have been sent: %s", error)
        finally:
            process.close(max(0.0, ends_s - time.monotonic()))

    def _take_last_process(self, patience_s: float) -> CompanionProcess | None:
        """The process that there is; one that another thread is starting and that doesn't come up in time is killed."""
        self._closed = True
        while not self._lock.acquire(timeout=patience_s):
            if (starting := self._starting) is not None:
                starting.kill()
            patience_s = _KILL_AGAIN_S
        try:
            process, self._process = self._process, None
            self._dismiss_when_dropped(None)
            return process
        finally:
            self._lock.release()
