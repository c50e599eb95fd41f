"""Let one thread of a process at a time do something that others wait for, no longer than any wait may last."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stepkeeper.coordination.waits import Waits

__all__ = ["Turns"]

_LOOK_S: Final = 0.2
"""The interval at which a thread that waits for its turn checks whether the wait has to end."""


class Turns:
    """Give turns to threads, one at a time. A lock of Python would hold up the train thread, whatever it is told."""

    def __init__(self, waits: Waits, what: str) -> None:
        """Let the first thread come.

        Args:
            waits: Ends the waits for a turn.
            what: What a thread does in its turn, for people.

        """
        self._waits = waits
        self._what = what
        self._lock = threading.Lock()

    @contextmanager
    def take_turn(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the turn for the block. Wait first while another thread has it.

        Args:
            timeout_s: Seconds to wait; None waits until the turn comes or all waits end.

        Raises:
            TimeoutError: Another thread still has the turn after `timeout_s`.
            NoticeDeadlineError: The time of a notice was over before.
            PeerLostError: Another rank is lost.

        """
        self._await_turn(timeout_s)
        try:
            yield
        finally:
            self._lock.release()

    def _await_turn(self, timeout_s: float | None) -> None:
        since_s = time.monotonic()
        left_s = _LOOK_S if timeout_s is None else timeout_s
        while not self._lock.acquire(timeout=max(0.0, min(_LOOK_S, left_s))):
            waited_s = time.monotonic() - since_s
            if timeout_s is not None and (left_s := timeout_s - waited_s) <= 0:
                raise TimeoutError(f"another thread was still {self._what} after {waited_s:.1f} s")
            self._waits.check(since_s)
