"""Start the companion process, send it requests, and notice when it is gone: the trainer's end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from stepkeeper.companion.channel import Channel
from stepkeeper.companion.messages import CloseRequest, Kind
from stepkeeper.contract import Directive
from stepkeeper.contract.wire import decode, encode
from stepkeeper.error_codec import decode_error
from stepkeeper.errors import CompanionLostError, StepkeeperError
from stepkeeper.loggers import logger

__all__ = ["CompanionProcess"]

_log: Final = logger(__name__)
_EXIT_TIMEOUT_S: Final = 2.0
_ANSWER_TIMEOUT_S: Final = 3600.0
"""Longer than the companion tries to reach a store that doesn't answer, for the request and for the work after
commits.
"""
_NOBODY: Final = 0
"""Id of messages without an answer: the trainer's state, and the last message."""

_FAREWELL_MILLIS: Final = 120_000
"""Milliseconds that a dismissed process has for the work after its commits and for its last report."""


class CompanionProcess:
    """Talk to one companion process, from its start to its end.

    Any thread may send requests; answers come in any order.
    """

    def __init__(self, on_directive: Callable[[Directive], None]) -> None:
        """Start the process.

        Args:
            on_directive: Called with each directive of the operator, in the thread that receives from the
                companion.

        """
        self._on_directive = on_directive
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _spawn(theirs.fileno())
        self._channel = Channel(ours)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._next_id = 1
        self._lost = self._is_dismissed = False
        self._owner = os.getpid()
        self._complaint: str | None = None
        self.structure_key: str | None = None
        """Key of the structure that the process holds: that of its last save. Callers that request writes set it."""

        self._reader = threading.Thread(target=self._read, name="companion", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        """True once the process can't be reached any more."""
        return self._lost

    @property
    def complaint(self) -> str | None:
        """The newest failure of the work after a commit; None if there was none, or once that work went well again."""
        return self._complaint

    def send_request(
        self, kind: Kind, body: dict[str, Any], fds: Sequence[int] = (), timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        """Send a request and wait for the companion's answer.

        Args:
            kind: The message's name on the wire.
            body: The request, as JSON.
            fds: Open file descriptors to send along.
            timeout_s: Seconds to wait, after which the process is ended.

        Returns:
            The answer's body.

        Raises:
            CompanionLostError: The process is gone, or gave no answer in time and was ended.
            StepkeeperError: What the companion raised, as the same class.

        """
        future: Future[dict[str, Any]] = Future()
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            if self._lost:
                raise self._loss(kind)
            number, self._next_id = self._next_id, self._next_id + 1
            self._pending[number] = future
        try:
            self._channel.send({"id": number, "kind": kind, "body": body}, fds, timeout_s=timeout_s)
            return future.result(max(0.0, ends_s - time.monotonic()))
        except StepkeeperError:
            raise
        except TimeoutError as error:
            self.kill()
            raise CompanionLostError(
                f"the companion process {self.pid} did not answer {kind} within {timeout_s} s and was ended"
            ) from error
        except OSError as error:
            raise self._loss(kind) from error

    def send_state(self, kind: Kind, body: dict[str, Any]) -> None:
        """Send a message without waiting for anything. It is lost if the companion is gone or doesn't keep up."""
        with suppress(OSError):
            self._channel.send({"id": _NOBODY, "kind": kind, "body": body}, timeout_s=0.0)

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()
        self._process.wait()
        self._lost = True

    def close(self, timeout_s: float = _EXIT_TIMEOUT_S) -> None:
        """End the process: it ends by itself when it sees its socket closed, and is killed after `timeout_s`."""
        self._channel.shut_down()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()
        self._channel.close()

    def dismiss(self) -> None:
        """Let the process finish the work after its commits and end by itself, leaving nothing behind.

        This waits for nothing and takes no lock, so that it may be called wherever garbage is collected. In a
        forked child, which has the same socket, it does nothing: the process is the parent's.
        """
        if os.getpid() != self._owner:
            return
        self._is_dismissed = True
        farewell = encode(CloseRequest(within_millis=_FAREWELL_MILLIS))
        try:
            self._channel.send({"id": _NOBODY, "kind": Kind.CLOSE, "body": farewell}, timeout_s=0.0)
        except OSError:
            self._channel.shut_down()

    def _loss(self, kind: Kind) -> CompanionLostError:
        code = self._process.poll()
        how = "its socket is closed" if code is None else f"it ended with {code}"
        return CompanionLostError(f"the companion process {self.pid} is gone ({how}) while asked to {kind}")

    def _read(self) -> None:
        try:
            while (packet := self._channel.receive()) is not None:
                if self._is_dismissed and packet.message.get("id") == _NOBODY:
                    self._channel.shut_down()
                    break
                self._take(packet.message)
        except Exception:
            # Threads that wait for an answer must not wait for ever.
            _log.exception("the companion process %d can't be understood; it is ended", self.pid)
            self._process.kill()
        with self._lock:
            self._lost = True
            pending, self._pending = self._pending, {}
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        how = f"the companion process {self.pid} went away (code {self._process.poll()})"
        for future in pending.values():
            future.set_exception(CompanionLostError(f"{how} with a request unanswered"))
        if self._is_dismissed:
            self.kill()
            self._channel.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "directive" in message:
            self._follow(decode(Directive, message["directive"]))
            return
        if "complaint" in message:
            self._complaint = message["complaint"]
            if self._complaint is not None:
                _log.error("%s; the commit stands, and it is tried again after the next one", self._complaint)
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
        except Exception:  # answers that come after it are for others to have
            _log.exception("the operator's directive %s was not followed", directive)


def _spawn(fd: int) -> "subprocess.Popen[bytes]":
    python_path = os.pathsep.join(filter(None, [*_package_folders(), os.environ.get("PYTHONPATH", "")]))
    # A process group of its own: signals to the trainer's group are not for the companion.
    with _stop_signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "stepkeeper.companion", str(fd), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            process_group=0,
            # With arenas of their own, its threads would keep freed memory: as much again as the process needs.
            env={**os.environ, "PYTHONPATH": python_path, "MALLOC_ARENA_MAX": "1"},
        )


def _package_folders() -> list[str]:
    """List the folders that the trainer imports the packages from, however it found them."""
    folders = [Path(__file__).parents[2]]
    planners = find_spec("stepkeeper_planners")
    if planners is not None and planners.origin is not None:
        folders.append(Path(planners.origin).parents[1])
    return list(dict.fromkeys(map(str, folders)))


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals while the child starts: it inherits the mask until it has said which signals it ignores."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
