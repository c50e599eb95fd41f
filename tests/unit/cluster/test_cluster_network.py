"""Test how the cable between the machine and a cluster is removed while the kernel may be about to do it."""

from pathlib import Path

import pytest

from stepcluster import network
from stepcluster.errors import CommandError, StartError
from stepcluster.layout import Layout

LAYOUT = Layout(name="a", block=128, folder=Path("/state/a"))
CABLE = "stepk128"


@pytest.fixture
def cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel shows of the cable, which is there."""
    monkeypatch.setattr(network, "INTERFACES", tmp_path)
    monkeypatch.setattr(network, "END_TIMEOUT_S", 0.3)
    (tmp_path / CABLE).touch()
    return tmp_path / CABLE


def fail_with(monkeypatch: pytest.MonkeyPatch, cable: Path, said: str) -> None:
    """Let `ip` say this and fail. Whatever it says, the kernel has removed the cable."""

    def run(argv: list[str]) -> str:
        assert argv == ["ip", "link", "delete", CABLE]
        cable.unlink()
        raise CommandError(f"`{' '.join(argv)}` ended with 1: {said}")

    monkeypatch.setattr(network, "run", run)


@pytest.mark.parametrize("said", [f'Cannot find device "{CABLE}"', "RTNETLINK answers: No such device"])
def test_a_cable_that_the_kernel_removes_meanwhile_is_removed(
    monkeypatch: pytest.MonkeyPatch, cable: Path, said: str
) -> None:
    fail_with(monkeypatch, cable, said)
    network.disconnect(LAYOUT)


def test_a_cable_that_cannot_be_removed_is_an_error(monkeypatch: pytest.MonkeyPatch, cable: Path) -> None:
    fail_with(monkeypatch, cable, "RTNETLINK answers: Operation not permitted")
    with pytest.raises(CommandError, match="not permitted"):
        network.disconnect(LAYOUT)


def test_a_cable_that_stays_is_an_error(monkeypatch: pytest.MonkeyPatch, cable: Path) -> None:
    monkeypatch.setattr(network, "run", lambda _: "")
    with pytest.raises(StartError, match=f"the end of {CABLE}: not within"):
        network.disconnect(LAYOUT)
    assert cable.exists()


def test_a_cable_that_is_gone_is_not_removed(monkeypatch: pytest.MonkeyPatch, cable: Path) -> None:
    cable.unlink()
    monkeypatch.setattr(network, "run", lambda argv: pytest.fail(f"{argv}"))
    network.disconnect(LAYOUT)
