"""Share what all tests need: processes that have torch already, the order of the tests, the table of their times."""

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fork_server import TORCH, ForkServer
from hypothesis import settings

# No example is timed: this machine may stop any of them for a while.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = Path(__file__).parent


def pytest_configure() -> None:
    """SIGINT means something, here and in what tests start: a shell that runs this behind it has it ignored by all."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each of several pytest workers whole files, and all that share the cluster to one of them, as its first.

    What needs processes with torch_xla is marked as such.
    """
    items.sort(key=lambda item: not _is_on_cluster(item))
    for item in items:
        if "devices_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xla)
        item.add_marker(pytest.mark.xdist_group("cluster" if _is_on_cluster(item) else str(item.path)))


def _is_on_cluster(item: pytest.Item) -> bool:
    return item.path.is_relative_to(ROOT / "e2e")


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
