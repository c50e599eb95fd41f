"""Share what all tests need: the tier of each test, and processes that have torch already."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fork_server import TORCH, ForkServer
from hypothesis import settings

# No example is timed: this machine may stop any of them for a while.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("quick")

TESTS = Path(__file__).parent
TIERS = {
    "unit": "gate",
    "contract": "gate",
    "property": "gate",
    "integration": "full",
    "mutations": "full",
    "e2e": "e2e",
}
"""Where the tests of a folder belong, unless a mark says otherwise."""


def pytest_configure() -> None:
    """SIGINT means something, here and in what tests start: a shell that runs this behind it has it ignored by all."""
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
    if item.get_closest_marker("built"):
        return "e2e"
    if item.get_closest_marker("smoke"):
        return "gate"
    return TIERS[item.path.relative_to(TESTS).parts[0]]


@pytest.fixture(scope="session")
def torch_servers() -> Iterator[tuple[ForkServer, ForkServer]]:
    """Start two, for ranks to come from in turn: from one, all would have one seed of `hash()`."""
    with closing(ForkServer(*TORCH)) as server, closing(ForkServer(*TORCH)) as other:
        yield server, other


@pytest.fixture(scope="session")
def torch_server(torch_servers: tuple[ForkServer, ForkServer]) -> ForkServer:
    return torch_servers[0]
