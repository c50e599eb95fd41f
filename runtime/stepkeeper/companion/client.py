"""Send requests to a companion process, and notice when it is gone. This is the trainer's end."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from stepkeeper.companion.messages import CloseRequest, Kind
from stepkeeper.companion.processes import companion_environment, start_companion
from stepkeeper.contract import Directive
from stepkeeper.contract.wire import decode, encode
from stepkeeper.errors import CompanionLostError, StepkeeperError, decode_error
from stepkeeper.fork_guard import forget_in_forks, forks_held_back
from stepkeeper.loggers import logger
from stepkeeper.stacks.stack_file import stack_file

__all__ = ["CompanionProcess"]

_log: Final = logger(__name__)
_EXIT_TIMEOUT_S: Final = 2.0
_CLOSE_TIMEOUT_S: Final = 4.0
_REAPED_S: Final = 0.1
"""The least seconds that a killed process and its reading thread have to end, even if the time is up."""

_LOOK_S: Final = 2.0
"""The interval at which a wait for an answer checks whether the companion makes progress."""

_KILL_TIMEOUT_S: Final = 2.0
"""Seconds that a killed process may take to end. In a hanging system call, as on a hung NFS, it takes longer."""

_NO_REQUEST: Final = 0
"""Id of messages for whose answer no thread waits: the trainer's state, and the request to close of `dismiss`."""

_FAREWELL_MILLIS: Final = 120_000
"""Milliseconds that a dismissed process has for the upkeep after its commits and for its last report."""


class CompanionProcess:
    """Exchange messages with one companion process. Any thread may send; answers come in any order."""

    def __init__(self, on_directive: Callable[[Directive], None]) -> None:
        """Start the process without waiting for it. The reading thread calls `on_directive`."""
        self._on_directive = on_directive
        self._lock = threading.Lock()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._upkeep: dict[int, Future[None]] = {}
        """Futures by the commit's slot, until both the caller and the companion's notice have used them."""

        self._next_id = 1
        self.lost = False
        """True once the process can no longer be reached."""

        self._is_dismissed = False
        self._owner = os.getpid()
        self.complaint: str | None = None
        """The newest failure of the upkeep after a commit; None if the newest upkeep succeeded."""

        self.structure_key: str | None = None
        """Key of the structure (names, shapes and shardings of a state) that the process has from its last save.
        Callers that request writes set it.
        """

        env = companion_environment()
        with forks_held_back():
            self._channel, self._process = start_companion(env)
            forget_in_forks(self)
        self._reader = threading.Thread(target=self._read, name="companion", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_request(
        self,
        kind: Kind,
        body: dict[str, Any],
        fds: Sequence[int] = (),
        *,
        timeout_s: float,
        makes_progress: Callable[[], bool] = lambda: False,
        kill_timeout_s: float = _KILL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send a request with open file descriptors, wait for the companion's answer, and return its body.

        After `timeout_s` seconds without progress the process is killed, and has `kill_timeout_s` seconds to end.
        `makes_progress` is polled meanwhile: it returns True if there was progress since its last call.

        Raises CompanionLostError if the process is gone or was killed, or the companion's own StepkeeperError.
        """
        future: Future[dict[str, Any]] = Future()
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            if self.lost:
                raise self._loss(kind)
            number, self._next_id = self._next_id, self._next_id + 1
            self._pending[number] = future
        try:
            self._channel.send({"id": number, "kind": kind, "body": body}, fds, timeout_s=timeout_s)
            return _await_answer(future, ends_s, timeout_s, makes_progress)
        except StepkeeperError:
            raise
        except TimeoutError as error:
            self.kill(kill_timeout_s)
            raise CompanionLostError(
                f"the companion process {self.pid} did not answer {kind} and made no progress for {timeout_s} s; "
                "it was ended"
            ) from error
        except OSError as error:
            raise self._loss(kind) from error

    def upkeep_of(self, slot: int) -> Future[None]:
        """Return a future for the end of the upkeep after the commit in `slot`. Call it once per commit.

        It fails with CompanionLostError if the process is lost before.
        """
        with self._lock:
            found = self._upkeep_future(slot)
            if self.lost and not found.done():
                found.set_exception(self._unfinished())
        return found

    def _upkeep_future(self, slot: int) -> Future[None]:
        """Return the commit's future for its two users: the waiting caller, and the companion's notice."""
        found = self._upkeep.pop(slot, None)
        if found is None:
            found = self._upkeep[slot] = Future()
        return found

    def _unfinished(self) -> CompanionLostError:
        return CompanionLostError(
            f"the companion process {self.pid} was lost before it had verified its last commit and deleted old ones"
        )

    def send_state(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Send a message without waiting. It is dropped if the companion is gone or doesn't keep up."""
        with suppress(OSError):
            self._channel.send({"id": _NO_REQUEST, "kind": kind, "body": body}, timeout_s=0.0)

    def kill(self, timeout_s: float = _KILL_TIMEOUT_S) -> None:
        """Kill the process at once, fail all pending requests, and wait `timeout_s` seconds for its end."""
        self._process.kill()
        self._channel.shut_down()
        if not self._process.wait(timeout_s):
            _log.warning(
                "the companion process %d was killed and did not end within %.1f s: check whether its disk hangs",
                self.pid,
                timeout_s,
            )
        self.lost = True

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Close the socket, so that the process ends, and kill it after half of `timeout_s` seconds."""
        ends_s = time.monotonic() + timeout_s
        self._channel.shut_down()
        if not self._process.wait(timeout_s / 2):
            self.kill(max(_REAPED_S, ends_s - time.monotonic()))
        self._reader.join(max(_REAPED_S, ends_s - time.monotonic()))
        if not self._reader.is_alive():
            self._channel.close()

    def dismiss(self) -> None:
        """Let the process finish the upkeep after its commits and end by itself.

        This takes no lock, so the garbage collector may call it anywhere. In a child that C code forked, which has the
        same socket, it does nothing: the process is the parent's.
        """
        if os.getpid() != self._owner:
            return
        self._is_dismissed = True
        farewell = encode(CloseRequest(within_millis=_FAREWELL_MILLIS))
        try:
            self._channel.send({"id": _NO_REQUEST, "kind": Kind.CLOSE, "body": farewell}, timeout_s=0.0)
        except OSError:
            self._channel.shut_down()

    def forget_after_fork(self) -> None:
        """Close this copy of the socket in a forked child: the process is its parent's."""
        self._lock = threading.Lock()
        self.lost = True
        self._process.forget_after_fork()
        self._channel.close()

    def _loss(self, kind: Kind) -> CompanionLostError:
        how = f"it ended with {self._process.code}" if self._process.has_ended() else "its socket is closed"
        return CompanionLostError(
            f"the companion process {self.pid} is gone ({how}) during the request {kind}"
        )

    def _read(self) -> None:
        try:
            while (packet := self._channel.receive(self._process)) is not None:
                if self._is_dismissed and packet.message.get("id") == _NO_REQUEST:
                    # The answer to `dismiss`: the process is done, and ends once the socket is closed.
                    self._channel.shut_down()
                    break
                self._take(packet.message)
        except Exception:
            # Threads that wait for an answer must not wait forever.
            _log.exception(
                "a message of the companion process %d can't be read; the process is ended", self.pid
            )
            self._process.kill()
        with self._lock:
            self.lost = True
            pending, self._pending = self._pending, {}
            for upkeep in self._upkeep.values():
                if not upkeep.done():
                    upkeep.set_exception(self._unfinished())
        self._process.wait(_EXIT_TIMEOUT_S)
        how = f"the companion process {self.pid} is gone (code {self._process.code})"
        for future in pending.values():
            future.set_exception(CompanionLostError(f"{how}, and a request was unanswered"))
        if self._is_dismissed:
            self.kill()
            self._channel.close()

    def _take(self, message: dict[str, Any]) -> None:
        """Handle a message of the companion: an answer, or one of the kinds that no request asked for."""
        if "directive" in message:
            self._follow(decode(Directive, message["directive"]))
            return
        if "stacks" in message:
            _write_stacks(message["stacks"])
            return
        if "complaint" in message:
            self.complaint = message["complaint"]
            if self.complaint is not None:
                _log.error(
                    "%s; the commit is valid, and the upkeep is retried after the next one", self.complaint
                )
            return
        if "upkept" in message:
            with self._lock:
                self._upkeep_future(message["upkept"]).set_result(None)
            return
        with self._lock:
            future = self._pending.pop(message["id"])
        if "error" in message:
            future.set_exception(decode_error(message["error"]))
        else:
            future.set_result(message["body"])

    def _follow(self, directive: Directive) -> None:
        try:
            self._on_directive(directive)
        except Exception:  # later answers are for other callers
            _log.exception("the operator's directive %s was not followed", directive)


def _write_stacks(number: int) -> None:
    try:
        stack_file().write(number)
    except Exception as error:  # saves continue without the stacks
        _log.warning("the stacks of this process's threads can't be written: %r", error)


def _await_answer(
    future: Future[dict[str, Any]], ends_s: float, timeout_s: float, makes_progress: Callable[[], bool]
) -> dict[str, Any]:
    """Wait until `ends_s`, and until `timeout_s` seconds after the last progress. Raises TimeoutError."""
    while True:
        left_s = ends_s - time.monotonic()
        try:
            return future.result(max(0.0, min(_LOOK_S, left_s)))
        except TimeoutError:
            if future.done():
                # The answer came just now, or the companion itself raised such an error.
                return future.result(0)
        if makes_progress():
            ends_s = time.monotonic() + timeout_s
        elif left_s <= 0:
            raise TimeoutError
