"""Share what all tests need: processes that have torch already, the order of the tests, the table of their times."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from fork_server import TORCH, ForkServer
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# No example is timed: this machine may stop any of them for a while.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

CLUSTER = "tests/e2e/"


def pytest_configure() -> None:
    """SIGINT means something, here and in what tests start: a shell that runs this behind it has it ignored by all."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Give each of several pytest workers whole files, and one of them all files that share the cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return CLUSTER if nodeid.startswith(CLUSTER) else nodeid.partition("::")[0]

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back what a worker that died had left to do. Returns the test that it died in, which isn't run again.

        xdist itself gives that test to other workers, which then die of it too. And it gives them the files that this
        one had finished: nothing to do, at whose end they never come for more, so that the run has no end.
        """
        files = {
            scope: [test for test, is_done in tests.items() if not is_done]
            for scope, tests in self.assigned_work.pop(node).items()
        }
        left = {scope: tests for scope, tests in files.items() if tests}
        if not left:
            return None
        died_in: str = next(iter(left.values())).pop(0)
        for scope, tests in reversed(left.items()):
            if tests:
                self.workqueue[scope] = dict.fromkeys(tests, False)
                self.workqueue.move_to_end(scope, last=False)
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a worker a file. One that has died just now gets nothing: `remove_node` takes the file back."""
        with suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker a file, and another where that has a single test: it runs a test once it has the next."""
        # One that replaces a dead worker asks for work itself, once it knows the tests.
        if node in self.registered_collections:
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFiles:
    return WholeFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the cluster: whoever has it waits for it most of the time."""
    items.sort(key=lambda item: not item.nodeid.startswith(CLUSTER))


@pytest.fixture(scope="session")
def torch_servers() -> Iterator[tuple[ForkServer, ForkServer]]:
    """Start two, for ranks to come from in turn: from one, all would have one seed of `hash()`."""
    with closing(ForkServer(*TORCH)) as server, closing(ForkServer(*TORCH)) as other:
        yield server, other


@pytest.fixture(scope="session")
def torch_server(torch_servers: tuple[ForkServer, ForkServer]) -> ForkServer:
    return torch_servers[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each part of a CI run, then of each folder of tests, before the closing line."""
    seconds: dict[str, float] = defaultdict(float)
    times_file = os.environ.get("STEPKEEPER_TIMES")
    if times_file:
        for line in Path(times_file).read_text(encoding="utf-8").splitlines():
            part, elapsed_s = line.split()
            seconds[part] += float(elapsed_s)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.split("/")[1]
                seconds[f"tests/{folder}"] += report.duration
    terminalreporter.section("where the time went")
    for part, value in seconds.items():
        terminalreporter.write_line(f"{value:8.1f} s  {part}")
