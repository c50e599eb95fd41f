"""Share what all tests need: the tier of each test, and processes that have torch already."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fork_server import TORCH, ForkServer
from hypothesis import settings

# No example is timed: this machine may stop any of them for a while.
# `make test` tries the same examples each time, so that no change is refused for an older fault. `make test-all` tries
# other ones in each run, also where hypothesis finds that it is CI: a failure prints how to repeat it.
_ALIKE = settings(deadline=None, print_blob=True)
settings.register_profile("quick", _ALIKE, max_examples=25, derandomize=True, database=None)
settings.register_profile("thorough", _ALIKE, max_examples=100, derandomize=False)
settings.load_profile("quick")

TESTS = Path(__file__).parent
TIERS = {
    "unit": "gate",
    "contract": "gate",
    "property": "gate",
    "integration": "full",
    "e2e": "e2e",
    "sabotage": "full",
}
"""Where the tests of a folder belong, unless a mark says otherwise."""


def pytest_configure() -> None:
    """Restore SIGINT, which a shell ignores in background jobs and their children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the mark of its tier: gate (`make test`), e2e (`make test-e2e`) or full (`make test-all`).

    Outside `make test` a test that hangs ends later: it may start a cluster or many processes, or try many cases.
    """
    is_quick = settings.get_current_profile_name() == "quick"
    for item in items:
        tier = _tier(item)
        item.add_marker(tier)
        if not (is_quick and tier == "gate") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


def _tier(item: pytest.Item) -> str:
    if item.get_closest_marker("long"):
        return "full"
    folder = item.path.relative_to(TESTS).parts[0]
    if item.get_closest_marker("built"):
        if folder != "contract":
            raise pytest.UsageError(
                f"{item.nodeid}: only contract tests are marked `built`; no run would have it"
            )
        return "e2e"
    if item.get_closest_marker("smoke"):
        return "gate"
    return TIERS[folder]


@pytest.fixture(scope="session")
def torch_servers() -> Iterator[tuple[ForkServer, ForkServer]]:
    """Start two, for ranks to come from in turn: from one, all would have one seed of `hash()`."""
    with closing(ForkServer(*TORCH)) as server, closing(ForkServer(*TORCH)) as other:
        yield server, other


@pytest.fixture(scope="session")
def torch_server(torch_servers: tuple[ForkServer, ForkServer]) -> ForkServer:
    return torch_servers[0]
