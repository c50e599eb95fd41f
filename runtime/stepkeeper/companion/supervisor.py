"""Keeps a companion process at hand: started when first needed, and again after one was lost."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Begin, Begun, Close, Kind, Open
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import Directive
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import CompanionLostError, FencedError
from stepkeeper.log import CommitRecord

__all__ = ["Companion"]

_log: Final = logging.getLogger(__name__)
_OPEN_TIMEOUT_S: Final = 60.0
_CLOSE_SLACK_S: Final = 2.0


class Companion:
    """The companion as the trainer sees it: its processes come and go, the claim stays."""

    def __init__(self, opening: Open, on_directive: Callable[[Directive], None]) -> None:
        self._opening = opening
        self._on_directive = on_directive
        self._lock = threading.Lock()
        self._process: CompanionProcess | None = None
        self._begun: Begun | None = None
        self._state = TrainerState()

    @property
    def begun(self) -> Begun | None:
        """The claim of this process, once it has one."""
        return self._begun

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.lost else process.pid

    def process(self) -> CompanionProcess:
        """A running companion process that knows the root, the claim and the trainer's state.

        A piece of work that needs several requests makes them all of one process: a new one knows nothing of it.

        Raises:
            CompanionLostError: it went away while it started.
            FencedError: another claim owns the root by now.

        """
        with self._lock:
            if self._process is not None and not self._process.lost:
                return self._process
            if self._process is not None:
                _log.warning("the companion process %d is gone; starting another one", self._process.pid)
                self._process.close()
            process = CompanionProcess(self._on_directive)
            claim = None if self._begun is None else self._begun.claim
            process.ask(Kind.OPEN, encode(replace(self._opening, claim=claim)), timeout_s=_OPEN_TIMEOUT_S)
            process.tell(Kind.STATE, encode(self._state))
            self._process = process
            return process

    def begin(self, *, base: int | None = None, take_over: str | None = None) -> Begun:
        """The root is claimed by this process, once; asked again, the same claim is the answer."""
        process = self.process()
        if self._begun is None:
            answer = process.ask(Kind.BEGIN, encode(Begin(base=base, take_over=take_over)))
            self._begun = decode(Begun, answer)
        return self._begun

    def latest(self, *, take_over: str | None = None) -> CommitRecord | None:
        """What HEAD names at this moment. The root is claimed by this process, if it wasn't before."""
        if self._begun is None:
            return self.begin(take_over=take_over).base
        return decode(Begun, self.process().ask(Kind.REFRESH, {})).base

    def tell(self, state: TrainerState) -> None:
        """Reports carry `state` from here on."""
        self._state = state
        process = self._process
        if process is not None and not process.lost:
            process.tell(Kind.STATE, encode(state))

    def close(self, flush_s: float) -> None:
        """The last report was answered, or `flush_s` have passed; the process has ended."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        try:
            if not process.lost:
                closing = Close(flush_millis=int(flush_s * 1000))
                process.ask(Kind.CLOSE, encode(closing), timeout_s=flush_s + _CLOSE_SLACK_S)
        except (CompanionLostError, FencedError) as error:
            _log.warning("the last report may not have been sent: %s", error)
        finally:
            process.close()
