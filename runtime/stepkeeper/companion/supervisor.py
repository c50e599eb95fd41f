"""Keeps a companion process at hand: started when first needed, and again after one was lost."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Begin, Begun, Close, Kind, Open
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
from stepkeeper.log import CommitRecord, ForeignBase
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger

__all__ = ["Companion", "Origin"]

_log: Final = logger(__name__)
_OPEN_TIMEOUT_S: Final = 60.0
_KILL_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What a state was restored from: each restore has its own, also of the same commit."""

    base: int | ForeignBase


@dataclass(frozen=True, slots=True, kw_only=True)
class _Succession:
    """Another claim of this process, after the one that it has; put or not, as long as there was no answer."""

    body: Begin
    origin: Origin


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
        self.choose_foreign_step: Callable[[], ForeignBase | None] = lambda: None
        """Asked, before a claim, for another writer's step to go on from, where there are such and no commit."""

        self._lock = threading.Lock()
        self._process: CompanionProcess | None = None
        self._starting: CompanionProcess | None = None
        self._farewell: weakref.finalize[[], Companion] | None = None
        self._closed = False
        self._begun: Begun | None = None
        self._origin: Origin | None = None
        self._succession: _Succession | None = None
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

    def process(self) -> CompanionProcess:
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
            self._process = self._started()
            self._bid_farewell_of(self._process)
            return self._process

    def _started(self) -> CompanionProcess:
        # One that may have been followed by another is proven with that one.
        held = None if self._succession is not None else self._begun
        claim = None if held is None else held.claim
        process = self._starting = CompanionProcess(self._on_directive)
        try:
            process.ask(Kind.OPEN, encode(replace(self._opening, claim=claim)), timeout_s=_OPEN_TIMEOUT_S)
            process.tell(Kind.STATE, encode(self._state))
        except BaseException:
            process.close()
            raise
        finally:
            self._starting = None
        return process

    def _bid_farewell_of(self, process: CompanionProcess | None) -> None:
        if self._farewell is not None:
            self._farewell.detach()
        self._farewell = None if process is None else weakref.finalize(self, process.leave)
        if self._farewell is not None:
            # When the interpreter ends, the socket's end tells the process.
            self._farewell.atexit = False

    def begin(self, *, origin: Origin | None = None, take_over: str | None = None) -> Begun:
        """The root is claimed by this process, which goes on from `origin`; without one, from what HEAD is.

        Asked again for the same, the same claim is the answer. For another origin, which isn't HEAD, the claim is
        followed by another one of this process. Raises FencedError if it didn't hold any more.
        """
        process = self._settled()
        if self._begun is None:
            body = replace(self._claiming, take_over=take_over or self._claiming.take_over)
            self._begun = self._claimed(process, body if origin is None else _based(body, origin))
            self._origin = origin
        elif origin is not None and origin is not self._origin:
            self._begun = self._succeeded(process, origin)
        return self._begun

    def begin_again(self, legacy: ForeignBase) -> Begun:
        """The claim of this process, which held until now, is followed by another one that goes on from `legacy`.

        Raises FencedError if it didn't hold any more.
        """
        return self.begin(origin=Origin(legacy))

    def latest(self, *, take_over: str | None = None) -> CommitRecord | ForeignBase | None:
        """What HEAD means at this moment. The root is claimed by this process, if it wasn't before."""
        if self._begun is None:
            begun = self.begin(take_over=take_over)
        else:
            begun = decode(Begun, self._resolved().ask(Kind.REFRESH, {}))
        return begun.base or begun.legacy

    def _resolved(self) -> CompanionProcess:
        """A running process. Whether the claim was followed by another one is known, and won't change any more.

        Where that wasn't put, HEAD stays what it is: whoever wants to know it has asked for nothing else.
        """
        process = self.process()
        if (succession := self._succession) is not None:
            stays = replace(succession.body, base=None, legacy=None)
            self._begun = self._followed(process, replace(succession, body=stays))
        return process

    def _settled(self) -> CompanionProcess:
        """A running process, and a claim that was to be followed by another one is."""
        process = self.process()
        if self._succession is not None:
            self._begun = self._followed(process, self._succession)
        return process

    def _succeeded(self, process: CompanionProcess, origin: Origin) -> Begun:
        assert self._begun is not None
        body = replace(self._claiming, after=self._begun.claim, nonce=new_nonce())
        self._succession = _Succession(body=_based(body, origin), origin=origin)
        try:
            return self._followed(process, self._succession)
        except StorageError as error:
            if not isinstance(error, TransientStorageError | UnknownOutcomeError):
                # Refused at its first put: nothing of it can be there.
                self._succession = None
            raise

    def _followed(self, process: CompanionProcess, succession: _Succession) -> Begun:
        try:
            begun = decode(Begun, process.ask(Kind.BEGIN, encode(succession.body)))
        except (FencedError, RestoreError):
            # It was not put, and isn't to be any more.
            self._succession = None
            raise
        self._succession = None
        if _stands_on(begun, succession.origin):
            self._origin = succession.origin
        return begun

    def _claimed(self, process: CompanionProcess, body: Begin) -> Begun:
        try:
            return decode(Begun, process.ask(Kind.BEGIN, encode(body)))
        except ForeignStepsError:
            # What another writer's step holds is for a process with torch to tell.
            body = replace(body, offer=self.choose_foreign_step())
            return decode(Begun, process.ask(Kind.BEGIN, encode(body)))

    def tell(self, state: TrainerState) -> None:
        """Reports carry `state` from here on."""
        self._state = state
        process = self._process
        if process is not None and not process.lost:
            process.tell(Kind.STATE, encode(state))

    def close(self, limit_s: float) -> None:
        """The process has ended within `limit_s`, and there will be no other.

        What comes after the last commits is done and the last report was answered, if that was possible in time.
        """
        ends_s = time.monotonic() + limit_s
        process = self._last(limit_s / 2)
        if process is None:
            return
        left_s = max(0.0, ends_s - time.monotonic())
        try:
            if not process.lost:
                closing = Close(within_millis=int(left_s * 600))
                process.ask(Kind.CLOSE, encode(closing), timeout_s=left_s * 3 / 4)
        except StepkeeperError as error:
            _log.warning("the last report may not have been sent: %s", error)
        finally:
            process.close(max(0.0, ends_s - time.monotonic()))

    def _last(self, patience_s: float) -> CompanionProcess | None:
        """The process that there is; one that another thread is starting and that doesn't come up in time is killed."""
        self._closed = True
        while not self._lock.acquire(timeout=patience_s):
            if (starting := self._starting) is not None:
                starting.kill()
            patience_s = _KILL_AGAIN_S
        try:
            process, self._process = self._process, None
            self._bid_farewell_of(None)
            return process
        finally:
            self._lock.release()


def _stands_on(begun: Begun, origin: Origin) -> bool:
    if isinstance(origin.base, ForeignBase):
        return begun.legacy is not None and begun.legacy.folder == origin.base.folder
    return begun.base is not None and begun.base.slot == origin.base


def _based(body: Begin, origin: Origin) -> Begin:
    if isinstance(origin.base, ForeignBase):
        return replace(body, legacy=origin.base)
    return replace(body, base=origin.base)
