"""Test how the cable between the machine and a cluster is removed while the kernel may be about to do it."""

from pathlib import Path

import pytest

from stepcluster import network
from stepcluster.errors import CommandError
from stepcluster.layout import Layout

# Of an interface that every machine has: the look finds it.
LAYOUT = Layout(name="a", block=128, folder=Path("/state/a"))


@pytest.fixture(autouse=True)
def interface_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "host_interface", "lo")


def fail_with(monkeypatch: pytest.MonkeyPatch, said: str) -> list[list[str]]:
    """Let `ip` say this and fail; returns its command lines, once there are any."""
    called: list[list[str]] = []

    def run(argv: list[str]) -> str:
        called.append(argv)
        raise CommandError(f"`{' '.join(argv)}` ended with 1: {said}")

    monkeypatch.setattr(network, "run", run)
    return called


@pytest.mark.parametrize("said", ['Cannot find device "lo"', "RTNETLINK answers: No such device"])
def test_a_cable_that_the_kernel_removes_meanwhile_is_removed(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    called = fail_with(monkeypatch, said)
    network.disconnect(LAYOUT)
    assert called == [["ip", "link", "delete", "lo"]]


def test_a_cable_that_cannot_be_removed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, "RTNETLINK answers: Operation not permitted")
    with pytest.raises(CommandError, match="not permitted"):
        network.disconnect(LAYOUT)


def test_a_cable_that_is_gone_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "host_interface", "none-such")
    assert fail_with(monkeypatch, "") == []
    network.disconnect(LAYOUT)
