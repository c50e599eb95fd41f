"""Let no thread be inside the ranks' store when the interpreter ends.

The store is C++. A daemon thread that comes back from it to an ending interpreter is unwound through frames that
allow no unwinding, and the whole process aborts.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

__all__ = ["STORE_CALLS", "StoreCalls"]


class StoreCalls:
    """Know the calls that are under way, and let none begin at the end of the process."""

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


STORE_CALLS: Final = StoreCalls()
"""Those of this process."""

os.register_at_fork(after_in_child=STORE_CALLS.forget_after_fork)
