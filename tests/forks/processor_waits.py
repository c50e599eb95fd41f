"""Measure how long processes could have run and had no processor, because other processes had them."""

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

__all__ = ["ProcessorWaits", "delays_s"]

_LOOK_S: Final = 0.05


def delays_s(pid: int) -> dict[str, float]:
    """Return, by thread of the process, how long it could have run by now and did not."""
    delays = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            delays[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return delays


class ProcessorWaits:
    """Within its block, watches processes, and this one, which measures the time."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = (*pids, os.getpid())
        self._before = self._look()
        self._latest = dict(self._before)
        self._at_s, self._waited_s = [time.monotonic()], [0.0]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="processor-waits", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def until_s(self, at_s: float) -> float:
        """Return how long all threads together had no processor from the begin of the block until `at_s`, monotonic."""
        return self._waited_s[max(0, bisect_right(self._at_s, at_s) - 1)]

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._note()
        self._note()

    def _note(self) -> None:
        # A thread that has ended waits no longer: what it was last seen with stays.
        self._latest |= self._look()
        waited_s = sum(delay_s - self._before.get(thread, 0.0) for thread, delay_s in self._latest.items())
        self._at_s.append(time.monotonic())
        self._waited_s.append(waited_s)

    def _look(self) -> dict[str, float]:
        return {f"{pid}/{thread}": s for pid in self._pids for thread, s in delays_s(pid).items()}
