"""Let no thread be inside the ranks' store when the interpreter ends.

The store is C++. A daemon thread that comes back from it to an ending interpreter is unwound through frames that
allow no unwinding, and the whole process aborts.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

__all__ = ["STORE_CALLS", "StoreCalls"]


class StoreCalls:
    """Count the calls that are under way, and stop at the end of the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_calls = 0
        self._ended = False

    @contextmanager
    def counted(self, alone: AbstractContextManager[object] | None = None) -> Iterator[None]:
        """Count a call, which holds `alone` if that is given. A daemon thread that comes after the end stays here."""
        with nullcontext() if alone is None else alone:
            if self._begin():
                try:
                    yield
                finally:
                    self._finish()
                return
        # It holds nothing that another thread waits for, and ends with the process.
        threading.Event().wait()

    def _begin(self) -> bool:
        with self._changed:
            if self._ended and threading.current_thread().daemon:
                return False
            self._n_calls += 1
        return True

    def _finish(self) -> None:
        with self._changed:
            self._n_calls -= 1
            self._changed.notify_all()

    def end(self, timeout_s: float) -> None:
        """Let no daemon thread begin another call, and wait for the calls that are under way, if not for too long."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: self._n_calls == 0, timeout_s)

    def forget_after_fork(self) -> None:
        """Begin anew in a forked child: the threads that were inside aren't there."""
        self._changed = threading.Condition()
        self._n_calls = 0


STORE_CALLS: Final = StoreCalls()
"""Those of this process."""

os.register_at_fork(after_in_child=STORE_CALLS.forget_after_fork)
