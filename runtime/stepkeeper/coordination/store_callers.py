"""Call the ranks' store in threads made for that, so that who asks it can give up.

The store's client is C++, and deaf: where the process that holds the store stands still, a call takes for ever.
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
"""The number of clients. While one is in a call, the other one serves: calls are short, and few threads ask at once."""

_LOOK_S: Final = 0.1
"""The interval at which a call that gets no answer checks whether it has to end."""


class _StoreCalls:
    """Know the calls that are under way, and let none begin at the end of the process.

    The store is C++. A daemon thread that comes back from it to an ending interpreter is unwound through frames that
    allow no unwinding, and the whole process aborts.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._began_s: dict[object, float] = {}
        self._ended = False

    @contextmanager
    def counted(self, alone: AbstractContextManager[object] | None = None) -> Iterator[None]:
        """Note a call, which holds `alone` if that is given. A daemon thread that comes after the end stays here."""
        call = object()
        with nullcontext() if alone is None else alone:
            if self._begin(call):
                try:
                    yield
                finally:
                    self._finish(call)
                return
        # It holds nothing that another thread waits for, and ends with the process.
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
        """Let no daemon thread begin another call, and wait for the calls that are under way.

        A call that has been under way for `timeout_s` seconds is stuck, and isn't waited for: the store stands still.
        """
        with self._changed:
            self._ended = True
            while (
                self._began_s and (left_s := max(self._began_s.values()) + timeout_s - time.monotonic()) > 0
            ):
                self._changed.wait(left_s)

    def forget_after_fork(self) -> None:
        """Begin anew in a forked child: the threads that were inside aren't there."""
        self._changed = threading.Condition()
        self._began_s = {}


STORE_CALLS: Final = _StoreCalls()
"""Those of this process."""

os.register_at_fork(after_in_child=STORE_CALLS.forget_after_fork)


class StoreCallers:
    """Threads that call one store, each with a client of its own: a client blocks all its users while one waits.

    All of them connect at the first call, which is at the start of the training. Kubernetes takes the names of a
    job's pods away before it stops these: later on, while the last step is saved, none could find the store any more.

    The threads end when nobody holds this object any more. One that is stuck is left behind; it keeps no process alive.
    """

    def __init__(self, store: Store) -> None:
        """Start no thread yet."""
        self._store = store
        self._begin()
        forget_in_forks(self)

    def ask(self, call: Callable[[Store], T], limit_s: float, check: Callable[[], None]) -> T:
        """Return what `call` returns for a client of the store.

        Args:
            call: Asks the store.
            limit_s: The longest time for the answer.
            check: Asked again and again meanwhile; what it raises ends the call.

        Raises:
            TimeoutError: There is no answer after `limit_s`.
            RuntimeError: The store is gone, or can't be reached.

        """
        ends_s = time.monotonic() + limit_s
        future: Future[T] = Future()
        self._threads.start(_Call(call, future))
        try:
            while True:
                try:
                    return future.result(max(0.0, min(_LOOK_S, ends_s - time.monotonic())))
                except TimeoutError:
                    if future.done():
                        return future.result(0)
                check()
                if time.monotonic() >= ends_s:
                    raise TimeoutError(f"no answer for {limit_s:.1f} s")
        finally:
            # Nobody waits for it any more; a call that is under way goes on.
            future.cancel()

    def forget_after_fork(self) -> None:
        """Forget the threads, which a forked child doesn't have, and their connections, which are its parent's."""
        self._dismissal.detach()
        self._begin()

    def _begin(self) -> None:
        self._threads = _Threads(self._store)
        self._dismissal = finalize(self, self._threads.dismiss)
        self._dismissal.atexit = False


class _Call(Generic[T]):
    """A question to the store, and what gives the answer to whoever waits for it."""

    def __init__(self, call: Callable[[Store], T], future: "Future[T]") -> None:
        self._call = call
        self._future = future

    def make(self, client: Store) -> None:
        """Ask, unless nobody waits for the answer any more."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            with STORE_CALLS.counted():
                found = self._call(client)
        except BaseException as error:  # whoever waits raises it
            self._future.set_exception(error)
        else:
            self._future.set_result(found)

    def fail(self, error: BaseException) -> None:
        """Raise the error where the answer is waited for."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


class _Threads:
    """The threads and their clients. They refer to nothing that would keep the rank group alive."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Reentrant: a signal handler may ask, too.
        self._starting = threading.RLock()
        self._cloning = threading.Lock()
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._n_running = 0

    def start(self, call: _Call[Any]) -> None:
        """Have the first thread that is idle make the call."""
        with self._starting:
            if not self._n_running:
                self._start_all()
            self._calls.put(call)

    def dismiss(self) -> None:
        """End each thread once it has nothing to do."""
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
        except BaseException as error:  # whoever waits raises it
            self._leave(error)
            return
        while (call := self._calls.get()) is not None:
            call.make(client)
            del call  # it refers to whoever waits

    def _leave(self, error: BaseException) -> None:
        """End a thread that couldn't connect. The last one answers what is asked, and the next call starts all anew."""
        with self._starting:
            self._n_running -= 1
            while not self._n_running and not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call.fail(error)

    def _connect(self) -> Store:
        with STORE_CALLS.counted(alone=self._cloning):
            client: Store = self._store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        return client
