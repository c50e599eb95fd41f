"""Call the ranks' store, torch.distributed's key-value store, from worker threads, so that callers can time out.

The store's client is C++ and can't be interrupted: if the process with the store hangs, a call never returns.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar
from weakref import finalize

from torch.distributed.distributed_c10d import Store

from stepkeeper.fork_guard import forget_in_forks

__all__ = ["STORE_CALLS", "StoreCallers"]

T = TypeVar("T")

_CLIENTS: Final = 2
"""The number of clients. While one is in a call, the other one is free: calls are short, and few threads call at
once."""

_LOOK_S: Final = 0.1
"""The interval at which an unanswered call checks whether it has to end."""


class _StoreCalls:
    """Track the calls in progress, and prevent new ones at the end of the process.

    Python ends a daemon thread that returns into an ending interpreter by unwinding its stack. The store's C++ frames
    don't allow that, and the whole process would abort.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._began_s: dict[object, float] = {}
        self._ended = False

    @contextmanager
    def counted(self, alone: AbstractContextManager[object] | None = None) -> Iterator[None]:
        """Register a call, which holds the lock `alone` if it is given. After `end`, a daemon thread stays here."""
        call = object()
        with nullcontext() if alone is None else alone:
            if self._begin(call):
                try:
                    yield
                finally:
                    self._finish(call)
                return
        # The thread waits here for the process's end. It holds no lock that another thread needs.
        threading.Event().wait()

    def _begin(self, call: object) -> bool:
        with self._changed:
            if self._ended and threading.current_thread().daemon:
                return False
            self._began_s[call] = time.monotonic()
        return True

    def _finish(self, call: object) -> None:
        with self._changed:
            self._began_s.pop(call, None)
            self._changed.notify_all()

    def end(self, timeout_s: float) -> None:
        """Prevent more calls by daemon threads, and wait for those in progress. A call is stuck after `timeout_s`."""
        with self._changed:
            self._ended = True
            while self._began_s:
                left_s = max(self._began_s.values()) + timeout_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def forget_after_fork(self) -> None:
        """Reset in a forked child, which doesn't have the calling threads."""
        self._changed = threading.Condition()
        self._began_s = {}


STORE_CALLS: Final = _StoreCalls()
"""The calls of this process."""

os.register_at_fork(after_in_child=STORE_CALLS.forget_after_fork)


class StoreCallers:
    """Threads that call one store, each with its own client: a client blocks all its users while one waits.

    All connect at the first call. Kubernetes removes the DNS names of a job's pods before it stops the pods, so during
    the last save none could connect. The threads end with the last reference to this object.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._begin()
        forget_in_forks(self)

    def ask(self, call: Callable[[Store], T], limit_s: float, check: Callable[[], None]) -> T:
        """Run `call` with a client of the store, and return its result.

        `check` is polled meanwhile, and an error that it raises ends the wait. Raises TimeoutError without an answer in
        `limit_s`, RuntimeError if the store is gone or can't be reached.
        """
        ends_s = time.monotonic() + limit_s
        future: Future[T] = Future()
        self._threads.start(_Call(call, future))
        try:
            while True:
                try:
                    return future.result(max(0.0, min(_LOOK_S, ends_s - time.monotonic())))
                except TimeoutError:
                    if future.done():  # just now, or the call itself raised it
                        return future.result(0)
                check()
                if time.monotonic() >= ends_s:
                    raise TimeoutError(f"no answer for {limit_s:.1f} s")
        finally:
            # The result is no longer needed; a call in progress continues.
            future.cancel()

    def forget_after_fork(self) -> None:
        """Forget the threads and connections in a forked child: they are its parent's."""
        self._dismissal.detach()
        self._begin()

    def _begin(self) -> None:
        self._threads = _Threads(self._store)
        self._dismissal = finalize(self, self._threads.dismiss)
        self._dismissal.atexit = False


class _Call(Generic[T]):
    """A call to the store, and the future for its result."""

    def __init__(self, call: Callable[[Store], T], future: "Future[T]") -> None:
        self._call = call
        self._future = future

    def make(self, client: Store) -> None:
        """Make the call, unless its future was canceled."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            with STORE_CALLS.counted():
                found = self._call(client)
        except BaseException as error:  # the waiting thread raises it
            self._future.set_exception(error)
        else:
            self._future.set_result(found)

    def fail(self, error: BaseException) -> None:
        """Make the waiting thread raise the error."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


class _Threads:
    """The threads and their clients. They have no reference to `StoreCallers`, which ends them when it is dropped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Reentrant: a signal handler may call too.
        self._starting = threading.RLock()
        self._cloning = threading.Lock()
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._n_running = 0

    def start(self, call: _Call[Any]) -> None:
        """Queue the call for the first idle thread."""
        with self._starting:
            if not self._n_running:
                self._start_all()
            self._calls.put(call)

    def dismiss(self) -> None:
        """End each thread once it is idle."""
        for _ in range(self._n_running):
            self._calls.put(None)

    def _start_all(self) -> None:
        """Start the threads. Raises RuntimeError while the interpreter ends."""
        for _ in range(_CLIENTS):
            threading.Thread(target=self._serve, name="store", daemon=True).start()
            self._n_running += 1

    def _serve(self) -> None:
        try:
            client = self._connect()
        except BaseException as error:  # the waiting thread raises it
            self._leave(error)
            return
        while (call := self._calls.get()) is not None:
            call.make(client)
            del call  # it refers to the waiting thread's objects

    def _leave(self, error: BaseException) -> None:
        """End a thread that couldn't connect. The last one fails the queued calls; a later call starts all threads."""
        with self._starting:
            self._n_running -= 1
            while not self._n_running and not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call.fail(error)

    def _connect(self) -> Store:
        with STORE_CALLS.counted(alone=self._cloning):
            client: Store = self._store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        return client
