"""Call the ranks' store in threads made for that, so that who asks it can give up.

The store's client is C++, and deaf: where the process that holds the store stands still, a call takes for ever.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final, TypeAlias, TypeVar
from weakref import finalize

from torch.distributed.distributed_c10d import Store

from stepkeeper.coordination.store_calls import STORE_CALLS
from stepkeeper.fork_guard import forget_in_forks

__all__ = ["StoreCallers"]

T = TypeVar("T")
_Call: TypeAlias = Callable[[Callable[[], Store]], Callable[[], None]]
"""Gets a function that returns the client, and returns one that tells the result to whoever waits for it."""

_LOOK_S: Final = 0.1
"""The interval at which a call that gets no answer checks whether it has to end."""


class StoreCallers:
    """Threads that call one store, each with a client of its own: a client blocks all its users while one waits.

    A call goes to an idle thread. There are as many threads as there ever were calls at once, and they end when nobody
    holds this object any more. One that is stuck is left behind, and keeps no process alive.
    """

    def __init__(self, store: Store) -> None:
        """Start no thread yet."""
        self._store = store
        self._cloning = threading.Lock()
        self._idle: deque[_Caller] = deque()
        finalize(self, _dismiss, self._idle).atexit = False
        forget_in_forks(self)

    def ask(self, call: Callable[[Store], T], limit_s: float, check: Callable[[], None]) -> T:
        """Return what `call` returns for a client of the store.

        Args:
            call: Asks the store.
            limit_s: The longest time for the answer.
            check: Asked again and again meanwhile; what it raises ends the call.

        Raises:
            TimeoutError: There is no answer after `limit_s`.
            RuntimeError: The store is gone.

        """
        ends_s = time.monotonic() + limit_s
        future: Future[T] = Future()
        self._take_caller().start(lambda client: _settle(future, call, client))
        while True:
            try:
                return future.result(max(0.0, min(_LOOK_S, ends_s - time.monotonic())))
            except TimeoutError:
                if future.done():
                    return future.result(0)
            check()
            if time.monotonic() >= ends_s:
                raise TimeoutError(f"no answer for {limit_s:.1f} s")

    def _take_caller(self) -> "_Caller":
        try:
            return self._idle.pop()
        except IndexError:
            return _Caller(self._store, self._cloning, self._idle)

    def forget_after_fork(self) -> None:
        """Forget the threads, which a forked child doesn't have, and their connections, which are its parent's."""
        self._cloning = threading.Lock()
        self._idle = deque()


class _Caller:
    """One thread and its client. It refers to nothing that would keep the rank group alive."""

    def __init__(self, store: Store, cloning: threading.Lock, idle: "deque[_Caller]") -> None:
        self._store, self._cloning, self._idle = store, cloning, idle
        self._client: Store | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_running = False

    def start(self, call: _Call) -> None:
        """Make the call, in the thread."""
        if not self._is_running:
            try:
                threading.Thread(target=self._serve, name="store", daemon=True).start()
            except RuntimeError:
                # The interpreter ends, and from Python 3.12 on starts no thread then. The client's own limit has to do.
                self._make(call)
                return
            self._is_running = True
        self._calls.put(call)

    def dismiss(self) -> None:
        """End the thread once it has nothing to do."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._make(call)
            del call  # it refers to whoever waits

    def _make(self, call: _Call) -> None:
        tell = call(self._connect)
        # Before the result is told: the next call finds this thread idle.
        self._idle.append(self)
        tell()

    def _connect(self) -> Store:
        if self._client is None:
            with STORE_CALLS.counted(alone=self._cloning):
                self._client = self._store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        return self._client


def _settle(
    future: "Future[T]", call: Callable[[Store], T], connect: Callable[[], Store]
) -> Callable[[], None]:
    """Make the call, and return what gives its result, or its error, to the future."""
    try:
        client = connect()
        with STORE_CALLS.counted():
            found = call(client)
    except BaseException as error:  # whoever waits raises it
        failure = error
        return lambda: future.set_exception(failure)
    return lambda: future.set_result(found)


def _dismiss(idle: "deque[_Caller]") -> None:
    while idle:
        idle.pop().dismiss()
