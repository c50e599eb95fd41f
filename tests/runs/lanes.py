"""Run files of tests side by side, and once more where they fail. Knows neither pytest nor clusters."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How a run of one file ended."""

    passed: bool
    failed_tests: tuple[str, ...] = ()


class Workplace(Protocol):
    """Where the files of a lane run, one after the other."""

    def run(self, file: Path, lane: int) -> Attempt: ...

    def renew(self, lane: int) -> bool:
        """Replace what the lane's files share, or make it. Returns False if that failed."""

    def clear(self, lane: int) -> None:
        """Remove what the lane's files share."""

    def has_second_chance(self, file: Path) -> bool: ...


@dataclass(kw_only=True)
class Lanes:
    """Run files, and record the results."""

    workplace: Workplace
    failed: list[Path] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    """Tests that failed in a file's first run, and passed in its second."""

    stopping: threading.Event = field(default_factory=threading.Event)
    _taken: set[Path] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run_all(self, orders: Sequence[Sequence[Path]]) -> None:
        """Run files until all have ended or `stopping` is set.

        Args:
            orders: For each lane the files that it may run, those that it begins with first. A file in several orders
                is run once, in the lane that comes to it first.

        """
        with ThreadPoolExecutor(len(orders)) as executor:
            lanes = [executor.submit(self._run_lane, lane, order) for lane, order in enumerate(orders)]
        for lane in lanes:
            lane.result()

    def _run_lane(self, lane: int, order: Sequence[Path]) -> None:
        if self.stopping.is_set():
            return
        try:
            self.workplace.renew(lane)
            while not self.stopping.is_set() and (file := self._take(order)):
                self._run_file(file, lane)
        finally:
            self.workplace.clear(lane)

    def _take(self, order: Sequence[Path]) -> Path | None:
        with self._lock:
            file = next((file for file in order if file not in self._taken), None)
            if file is not None:
                self._taken.add(file)
            return file

    def _run_file(self, file: Path, lane: int) -> None:
        first = self.workplace.run(file, lane)
        if first.passed:
            return
        if self.workplace.has_second_chance(file) and not self.stopping.is_set():
            is_fresh = self.workplace.renew(lane)
            if is_fresh and not self.stopping.is_set() and self.workplace.run(file, lane).passed:
                self.flaky += first.failed_tests or [str(file)]
                return
        self.failed.append(file)
