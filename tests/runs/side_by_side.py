"""Run the end-to-end tests, several files at a time: `python tests/runs/side_by_side.py [PYTEST-ARGUMENT…]`.

Each file is a pytest process of its own. Files run in lanes, and each lane has a cluster. A file below tests/e2e that
fails is run once more, on a fresh cluster. If it passes then, the run is green, and its end lists what failed at first.
Below out/tests/e2e are, for each file, pytest's output and XML.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import tally

from stepcluster import state
from stepcluster.machine import require_root

ROOT = Path(__file__).parents[2]
E2E = ROOT / "tests" / "e2e"
CONTRACT = ROOT / "tests" / "contract"
OUTPUT = ROOT / "out" / "tests" / "e2e"
TRAININGS = ("test_launching", "test_queued_resources_trainings", "test_demo", "test_text_lm_survives")
"""These need the processors most of the time, for pods that load torch."""

LONGEST = (
    "test_upgrades",
    "test_operator_is_quiet",
    "test_kueue",
    "test_queued_resources",
    "test_operator_stories",
    "test_operator_under_fire",
    "test_tpu_vms_join",
)
"""These wait most of the time, for minutes."""

N_LANES = 2
_INTERRUPTED = 130
_PASSED_OR_EMPTY = {0, 5}
"""pytest's exit codes where all tests passed, and where no test of the file is an end-to-end test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How a run of one file ended."""

    passed: bool
    failed_tests: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Clusters:
    """Runs files with pytest, each lane's on its cluster."""

    arguments: Sequence[str]
    is_stopped: bool = False
    _running: set["subprocess.Popen[bytes]"] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, file: Path, lane: int) -> Attempt:
        started_s = time.monotonic()
        output, xml = OUTPUT / f"{file.stem}.txt", OUTPUT / f"{file.stem}.xml"
        if output.exists():
            output.rename(output.with_suffix(".first.txt"))
        xml.unlink(missing_ok=True)
        command = ["pytest", "-m", "e2e", f"--junitxml={xml}", *self.arguments, str(file)]
        with output.open("wb") as stream:
            code = self._call(*command, stream=stream, variables={"STEPKEEPER_TEST_CLUSTER": _name(lane)})
        passed = code in _PASSED_OR_EMPTY
        results = tally.read_results(xml)
        if not passed and not tally.has_failed(results):
            # Its process crashed, or was killed.
            results = tally.write_crash(xml, str(file.relative_to(ROOT)), f"pytest ended with {code}")
        if not passed:
            print(output.read_text(encoding="utf-8", errors="replace"))
        line = tally.closing_line(tally.count(results), time.monotonic() - started_s)
        print(f"lane {lane}: {file.relative_to(ROOT)} {line}", flush=True)
        failed = tuple(result.name for result in results if result.outcome in tally.FAILED)
        return Attempt(passed=passed, failed_tests=failed)

    def renew(self, lane: int) -> bool:
        """Replace what the lane's files share, or make it. Returns False if that failed."""
        self.clear(lane)
        if self._call_stepcluster("up", "--name", _name(lane)) == 0:
            return True
        if not self.is_stopped:
            # The tests report then that there is no cluster of that name.
            print((OUTPUT / "clusters.txt").read_text(encoding="utf-8"), flush=True)
        return False

    def clear(self, lane: int) -> None:
        if _name(lane) in state.names():
            self._call_stepcluster("down", "--name", _name(lane), is_ending=True)

    def clear_abandoned(self) -> None:
        self._call_stepcluster("down", "--abandoned", is_ending=True)

    def list_left(self) -> list[str]:
        """Return the lanes' clusters that could not be taken down."""
        return [name for name in map(_name, range(N_LANES)) if name in state.names()]

    def has_second_chance(self, file: Path) -> bool:
        return file.is_relative_to(E2E)

    def interrupt(self) -> None:
        """End what runs, but for what ends clusters."""
        with self._lock:
            if self.is_stopped:
                # A second signal would end pytest before it has taken down what tests started.
                return
            self.is_stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT)

    def _call_stepcluster(self, *command: str, is_ending: bool = False) -> int:
        with (OUTPUT / "clusters.txt").open("ab") as log:
            return self._call("stepcluster", *command, stream=log, is_ending=is_ending)

    def _call(
        self,
        *command: str,
        stream: IO[bytes],
        variables: Mapping[str, str] | None = None,
        is_ending: bool = False,
    ) -> int:
        with self._lock:
            if self.is_stopped and not is_ending:
                return _INTERRUPTED
            # In a session of its own: Ctrl-C reaches this process alone, which passes it on.
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env={**os.environ, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if not is_ending:
                self._running.add(process)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code


@dataclass(kw_only=True)
class Lanes:
    """Run files, and record the results."""

    workplace: "Clusters"
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


def _name(lane: int) -> str:
    return f"lane-{lane}-{os.getpid()}"


def plan() -> list[list[Path]]:
    """Return, for each lane, which files it runs in which order.

    One lane has all trainings, which would slow each other so much that they test other things than they are meant to.
    Then it takes from the end of what the others have left. These begin with the longest.
    """
    files = [*E2E.rglob("test_*.py"), *CONTRACT.rglob("test_*.py")]
    ranks = {name: number for number, name in enumerate((*TRAININGS, *LONGEST))}
    files.sort(key=lambda file: (ranks.get(file.stem, len(ranks)), file.name))
    trainings = [file for file in files if file.stem in TRAININGS]
    waiting = [file for file in files if file.stem not in TRAININGS]
    return [[*trainings, *reversed(waiting)], *[waiting] * (N_LANES - 1)]


def main(arguments: Sequence[str]) -> int:
    require_root()
    started_s = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    clusters = Clusters(arguments=arguments)
    lanes = Lanes(workplace=clusters)

    def stop(_: int, __: object) -> None:
        lanes.stopping.set()
        # In a thread: the lock may be held by this one.
        threading.Thread(target=clusters.interrupt).start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    clusters.clear_abandoned()
    try:
        lanes.run_all(plan())
    finally:
        clusters.clear_abandoned()
    (OUTPUT / tally.FLAKY).write_text("".join(f"flaky: {name}\n" for name in lanes.flaky), encoding="utf-8")
    left = clusters.list_left()
    for name in left:
        print(f"cluster {name} could not be taken down: see {OUTPUT / 'clusters.txt'}")
    for file in lanes.failed:
        print(f"failed: {file.relative_to(ROOT)}")
    code = tally.main([str(time.monotonic() - started_s), *map(str, OUTPUT.glob("*.xml"))])
    if lanes.stopping.is_set():
        return _INTERRUPTED
    return 1 if lanes.failed or left else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
