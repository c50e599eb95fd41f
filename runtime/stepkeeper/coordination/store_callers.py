"""Call the ranks' store in threads made for that, so that who asks it can give up.

The store's client is C++, and deaf: where the process that holds the store stands still, a call takes for ever.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar
from weakref import finalize

from torch.distributed.distributed_c10d import Store

from stepkeeper.coordination.store_calls import STORE_CALLS
from stepkeeper.fork_guard import forget_in_forks

__all__ = ["StoreCallers"]

T = TypeVar("T")

_CLIENTS: Final = 2
"""The number of clients. While one is in a call, the other one serves: calls are short, and few threads ask at once."""

_LOOK_S: Final = 0.1
"""The interval at which a call that gets no answer checks whether it has to end."""


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
            if self._n_running or self._start_all():
                self._calls.put(call)
                return
        # The interpreter ends, and from Python 3.12 on starts no thread then. The client's own limit has to do.
        try:
            client = self._connect()
        except RuntimeError as error:
            call.fail(error)
            return
        call.make(client)

    def dismiss(self) -> None:
        """End each thread once it has nothing to do."""
        for _ in range(self._n_running):
            self._calls.put(None)

    def _start_all(self) -> bool:
        """Start the threads. Return False if none could be started."""
        for _ in range(_CLIENTS):
            try:
                threading.Thread(target=self._serve, name="store", daemon=True).start()
            except RuntimeError:
                break
            self._n_running += 1
        return self._n_running > 0

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
