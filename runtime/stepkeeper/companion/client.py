"""The trainer's end: starts the companion process, asks it for things, notices when it is gone."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import stepkeeper
from stepkeeper import errors
from stepkeeper.companion.channel import Channel
from stepkeeper.companion.messages import Kind
from stepkeeper.contract import Directive
from stepkeeper.contract.wire import decode
from stepkeeper.errors import CompanionError, CompanionLostError, StepkeeperError

__all__ = ["CompanionProcess", "error_from", "error_to"]

_EXIT_TIMEOUT_S: Final = 2.0


class CompanionProcess:
    """One companion process, from its start to its end. Any thread may ask; answers come in any order."""

    def __init__(self, on_directive: Callable[[Directive], None]) -> None:
        self._on_directive = on_directive
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _spawn(theirs.fileno())
        self._channel = Channel(ours)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._next_id = 1
        self._lost = False
        self._reader = threading.Thread(target=self._read, name="companion", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        """True once the process can't be asked any more."""
        return self._lost

    def ask(
        self, kind: Kind, body: dict[str, Any], fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The companion's answer.

        Raises:
            CompanionLostError: it is gone, or gave no answer in time and was ended.
            StepkeeperError: what the companion raised, as the same class.

        """
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._lost:
                raise self._loss(kind)
            number, self._next_id = self._next_id, self._next_id + 1
            self._pending[number] = future
        try:
            self._channel.send({"id": number, "kind": kind, "body": body}, fds)
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            self.kill()
            raise CompanionLostError(
                f"the companion process {self.pid} did not answer {kind} within {timeout_s} s and was ended"
            ) from error
        except StepkeeperError:
            raise
        except OSError as error:
            raise self._loss(kind) from error

    def tell(self, kind: Kind, body: dict[str, Any]) -> None:
        """The companion will see `body`, if it is there and keeps up; nothing waits for it."""
        with suppress(OSError):
            self._channel.send({"id": 0, "kind": kind, "body": body}, wait=False)

    def kill(self) -> None:
        """The process is gone at once."""
        self._process.kill()
        self._process.wait()
        self._lost = True

    def close(self) -> None:
        """The process has ended: it ends by itself when it sees its socket closed."""
        self._channel.hang_up()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()
        self._channel.close()

    def _loss(self, kind: Kind) -> CompanionLostError:
        code = self._process.poll()
        how = "its socket is closed" if code is None else f"it ended with {code}"
        return CompanionLostError(f"the companion process {self.pid} is gone ({how}) while asked to {kind}")

    def _read(self) -> None:
        while (packet := self._channel.receive()) is not None:
            message = packet.message
            if "directive" in message:
                self._on_directive(decode(Directive, message["directive"]))
                continue
            with self._lock:
                future = self._pending.pop(message["id"])
            if "error" in message:
                future.set_exception(error_from(message["error"]))
            else:
                future.set_result(message["body"])
        with self._lock:
            self._lost = True
            pending, self._pending = self._pending, {}
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        how = f"the companion process {self.pid} went away (code {self._process.poll()})"
        for future in pending.values():
            future.set_exception(CompanionLostError(f"{how} with a request unanswered"))


def error_to(error: BaseException) -> dict[str, str]:
    """`error` as another process can be told it."""
    return {"kind": type(error).__name__, "message": str(error)}


def error_from(raw: dict[str, str]) -> Exception:
    """The error that another process told of: the same class if it is one of ours, else CompanionError."""
    kind = getattr(errors, raw["kind"], None)
    if isinstance(kind, type) and issubclass(kind, StepkeeperError):
        return kind(raw["message"])
    return CompanionError(f"{raw['kind']}: {raw['message']}\n{raw.get('traceback', '')}".rstrip())


def _spawn(fd: int) -> "subprocess.Popen[bytes]":
    folder = str(Path(stepkeeper.__path__[0]).parent)
    python_path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    # A group of its own: what a terminal or a supervisor sends to the trainer's group is not for the companion.
    with _stop_signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "stepkeeper.companion", str(fd), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            process_group=0,
            env={**os.environ, "PYTHONPATH": python_path},
        )


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """The child inherits the mask, so that no signal ends it before it has said which ones it ignores."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
