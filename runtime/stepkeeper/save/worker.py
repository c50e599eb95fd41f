"""Run the calls of a save one after the other in a thread that keeps no process alive once nothing waits for it."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import SaveError, StepkeeperError
from stepkeeper.loggers import logger

__all__ = ["Worker"]

T = TypeVar("T")
_LOOK_S: Final = 0.2
_log: Final = logger(__name__)


class Worker:
    """Run calls in the order in which they were submitted. Any thread may submit them.

    The interpreter waits for their end at exit, so that a started save is finished. It doesn't wait for a thread that
    is stuck after a notice's deadline, after the loss of a rank, or after `close` has given it up. So a daemon thread
    runs the calls, and a guard, which isn't a daemon, waits for that thread. Both end when there are no more calls.
    """

    def __init__(self, name: str, waits: Waits) -> None:
        self._name = name
        self._waits = waits
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._is_guarded = False
        self._given_up = threading.Event()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `call` after those submitted before. Raises SaveError if no thread can be started now."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:  # the future raises it
                future.set_exception(error)

        with self._lock:
            self._calls.append(run)
            if self._thread is None:
                self._start_thread()
            if not self._is_guarded:
                self._start_guard(self._thread)
        return future

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._calls.pop()
            raise SaveError(
                f"no thread could be started for the save ({error}): the process or its pod is at its limit of "
                "threads. A later save tries again"
            ) from error
        self._thread, self._is_guarded = thread, False

    def _start_guard(self, thread: threading.Thread | None) -> None:
        """Make the interpreter wait for the thread at its end. If that fails, the next call tries again."""
        if thread is None:
            return
        try:
            threading.Thread(target=self._await_thread, args=(thread,), name="save-guard").start()
        except RuntimeError as error:
            _log.warning(
                "no thread could be started (%s): a save in flight at the process's end is lost", error
            )
        else:
            self._is_guarded = True

    def close(self, timeout_s: float) -> bool:
        """Wait until the calls have ended. Return False if they are given up, after `timeout_s` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, timeout_s))
            if thread.is_alive():
                self._given_up.set()
                return False
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.popleft()
            call()
            del call  # it refers to the save's snapshot

    def _await_thread(self, thread: threading.Thread) -> None:
        since_s = time.monotonic()
        with suppress(StepkeeperError):
            while thread.is_alive() and not self._given_up.is_set():
                thread.join(_LOOK_S)
                self._waits.check(since_s)
