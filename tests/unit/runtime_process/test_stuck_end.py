# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""What a process that is stuck in a call ends with, and that nothing holds up its end."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stepkeeper import loggers
from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import ExitCode, Interval, Settings, Termination
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import FencedError, PeerLostError, StepkeeperError
from stepkeeper.policy.save import EveryNSteps
from stepkeeper.save.saver import Saver
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper.training.step_controller import StepController
from stepkeeper_testing.pod import pod_identity


class Stuck:
    """A training in a pod whose grace period is over, in a call."""

    def __init__(self, folder: Path) -> None:
        self.places = PodPaths(settings_folder=folder, termination_file=folder / "termination")
        self.waits = Waits()
        self.saver = SimpleNamespace(fence=None, cost=None, own_commit=None, restored_commit=None)
        self.told: list[str] = []
        self.controller = StepController(
            EveryNSteps(1),
            SoloRankGroup(),
            cast(Saver, self.saver),
            progress=cast(
                Progress, SimpleNamespace(step=7, record_notice=self.told.append, send_latest_step=list)
            ),
            companion=cast(Companion, SimpleNamespace(claimed_root=None)),
            environment=Environment(
                identity=pod_identity(grace_s=0),
                settings=Settings(uri="file:///root", interval=Interval(steps=1)),
                places=self.places,
            ),
            saves_on_notice=True,
            waits=self.waits,
        )

    def end(self) -> None:
        self.controller.notices.record_notice("sigterm")
        with self.waits.in_call():
            self.controller._on_tick()

    @property
    def last_word(self) -> Termination:
        return Termination.from_json(self.places.termination_file.read_bytes())


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(loggers, "_TELL_S", 60.0)
    return found


@pytest.mark.parametrize(
    ("fence", "loss", "code"),
    [
        (None, None, ExitCode.SAVED),
        (FencedError("a later claim"), None, ExitCode.FENCED),
        (None, PeerLostError("rank 1 is lost"), ExitCode.PEER_LOST),
        (None, FencedError("rank 1 is lost: a later claim"), ExitCode.FENCED),
        (FencedError("a later claim"), PeerLostError("rank 1 is lost"), ExitCode.FENCED),
    ],
)
def test_a_fence_or_a_lost_rank_says_more_than_the_notice(
    tmp_path: Path,
    codes: list[int],
    fence: FencedError | None,
    loss: StepkeeperError | None,
    code: ExitCode,
) -> None:
    stuck = Stuck(tmp_path)
    stuck.saver.fence = fence
    if loss is not None:
        stuck.waits.end_all(loss)
    stuck.end()
    assert codes == [code]
    assert stuck.last_word.code == code
    assert stuck.last_word.error == (str(fence or loss) if fence or loss else None)


class Hanging(logging.Handler):
    """Writes to a file system that stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.given_up = False

    def emit(self, record: logging.LogRecord) -> None:
        del record
        self.given_up |= not self.free.wait(60)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(loggers, "_TELL_S", 0.001)
    handler, package = Hanging(), logging.getLogger("stepkeeper")
    package.addHandler(handler)
    yield handler
    handler.free.set()
    package.removeHandler(handler)
    for thread in threading.enumerate():
        if thread.name == "stepkeeper-tells":
            thread.join(60)


def test_a_log_that_hangs_holds_up_neither_the_stop_nor_the_end(
    tmp_path: Path, codes: list[int], hanging: Hanging
) -> None:
    stuck = Stuck(tmp_path)
    stuck.end()
    assert stuck.controller.decider.stop_is_agreed
    assert stuck.told == ["sigterm"]
    assert codes == [ExitCode.SAVED]
    assert not hanging.given_up, "all of that came while the log hung"
