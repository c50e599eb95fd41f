# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""How a process ends: its exit code, its last word, and that nothing holds up its end."""

import fcntl
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepkeeper import loggers
from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Cause, CommitPoint, ExitCode, Interval, Settings, Termination
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import (
    CompanionLostError,
    FencedError,
    NoticeDeadlineError,
    OtherJobsRootError,
    PeerLostError,
    SaveError,
    StepkeeperError,
    StorageAwayError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
    decode_error,
    encode_error,
)
from stepkeeper.policy.save import EveryNSteps
from stepkeeper.process_end.kernel_record import KernelRecord
from stepkeeper.process_end.killed import leave_word_of_killed
from stepkeeper.process_end.known_causes import find_known_cause
from stepkeeper.process_end.last_words import leave_last_word
from stepkeeper.save.persist import _join_refusals
from stepkeeper.save.saver import Saver
from stepkeeper.training import closing
from stepkeeper.training.closing import Closing
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper.training.grace_period import GracePeriod
from stepkeeper.training.notices.watcher import NoticeWatcher
from stepkeeper.training.step_controller import StepController
from stepkeeper.training.termination import ProcessExit, process_exit_code
from stepkeeper_testing.pod import pod_identity


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), ExitCode.DONE),
        (SystemExit(0), ExitCode.DONE),
        (SystemExit(3), 3),
        (SystemExit("no such preset"), 1),
        (FencedError("a later claim"), ExitCode.FENCED),
        (OtherJobsRootError("another job"), ExitCode.FENCED),
        (PeerLostError("rank 1 is lost"), ExitCode.PEER_LOST),
        (SaveError("no space"), 1),
        (ValueError("the loss is no number"), 1),
        (NoticeDeadlineError("the time to save is over"), ExitCode.SAVED),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert process_exit_code(error) == code


def test_a_last_word_can_be_read_whenever_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "termination"
    first = Termination(code=75, step=7, notice="sigterm", error="a long story, which ends well")
    second = Termination(code=0, step=8)
    leave_last_word(path, first)
    assert Termination.from_json(path.read_bytes()) == first

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for moment, left in (("pwrite", first), ("ftruncate", second)):
        with monkeypatch.context() as patched:
            patched.setattr(f"os.{moment}", killed)
            with pytest.raises(KeyboardInterrupt):
                leave_last_word(path, second)
        assert Termination.from_json(path.read_bytes()) == left
    leave_last_word(path, second)
    assert path.read_bytes() == second.to_json()


def test_a_process_beside_another_one_leaves_the_word_that_tells_more(tmp_path: Path) -> None:
    path = tmp_path / "termination"
    saved = Termination(code=75, step=7, rank=2)
    leave_last_word(path, saved)
    leave_last_word(
        path, Termination(code=78, step=6, rank=3, error="the store is gone, with rank 0 that it was in")
    )
    assert Termination.from_json(path.read_bytes()) == saved
    with path.open("rb") as held:
        # As by a process that was stopped at the wrong moment.
        fcntl.flock(held, fcntl.LOCK_EX)
        leave_last_word(path, Termination(code=77, rank=3))
    assert Termination.from_json(path.read_bytes()).code == 77
    leave_last_word(tmp_path, saved)  # a folder can't be written to, which ends nothing


FAILED = SaveError("a save in the background failed")
FAILED.__cause__ = TransientStorageError("503")
AWAY = [TransientStorageError("503"), UnknownOutcomeError("slot 7"), StorageAwayError("step 7")]


@pytest.mark.parametrize("error", [*AWAY, FAILED])
def test_a_store_that_gave_no_answer_is_a_cause_of_its_own(error: Exception) -> None:
    assert find_known_cause(error) is Cause.STORAGE_UNAVAILABLE


@pytest.mark.parametrize(
    ("refusals", "kind"),
    [
        ((TransientStorageError("503"),), StorageAwayError),
        ((TransientStorageError("503"), CompanionLostError("gone")), StorageAwayError),
        ((TransientStorageError("503"), ValueError("a bug")), SaveError),
        ((StorageError("full"),), SaveError),
        ((CompanionLostError("gone"),), CompanionLostError),
    ],
)
def test_all_ranks_hear_that_the_store_was_away(
    refusals: tuple[Exception, ...], kind: type[StepkeeperError]
) -> None:
    joined = _join_refusals(7, dict(enumerate(refusals)))
    assert type(joined) is kind
    assert type(decode_error(encode_error(joined))) is kind


class Ending:
    """The end of a process in a pod, and the word that it leaves."""

    def __init__(self, folder: Path) -> None:
        self.places = PodPaths(settings_folder=folder, termination_file=folder / "termination")
        settings = Settings(uri="file:///root", interval=Interval(steps=1))
        notices = cast(NoticeWatcher, SimpleNamespace(notice=None, notices=()))
        self.process_exit = ProcessExit(
            Environment(identity=pod_identity(), settings=settings, places=self.places),
            cast(Companion, SimpleNamespace(claimed_root=None)),
            cast(Progress, SimpleNamespace(step=7)),
            notices,
            GracePeriod(30, notices),
            rank=0,
        )

    def word_of(self, code: int, **how: Any) -> Termination:
        self.process_exit.write_termination_message(code, committed=None, restored=None, **how)
        return Termination.from_json(self.places.termination_file.read_bytes())


def test_the_last_word_says_so_of_a_failure_and_of_no_other_end(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    assert ending.word_of(1, failure=AWAY[0]).cause == Cause.STORAGE_UNAVAILABLE
    assert ending.word_of(1, failure=ValueError("a bug")).cause is None
    assert ending.word_of(78, failure=AWAY[0]).cause is None


def test_nothing_is_written_of_a_stop_once_it_is_known_how_the_process_ends(tmp_path: Path) -> None:
    ends = [(75, False), (1, True), (75, False), (77, True)]
    ending = Ending(tmp_path)
    assert [ending.word_of(code, is_final=final).code for code, final in ends] == [75, 1, 1, 77]


RESTORED = CommitPoint(sequence=1, step=10)


@contextmanager
def running(script: str = "read line") -> Iterator[tuple[subprocess.Popen[bytes], KernelRecord]]:
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as process:
        try:
            yield process, KernelRecord(process.pid)
        finally:
            process.kill()


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, and leave it to its parent to wait for."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGRTMIN + 2])
def test_the_signal_that_ended_a_process_can_be_read_until_its_parent_has_waited(number: int) -> None:
    with running() as (process, record):
        assert record.read_end_signal() is None, "it runs"
        process.send_signal(number)
        await_end(process)
        assert record.read_end_signal() == number
        process.wait()
        assert record.read_end_signal() is None


def killed(file: Path, number: int = signal.SIGSEGV) -> Termination:
    pod = pod_identity(termination_file=str(file))
    leave_word_of_killed(pod, 1, number, step=12, restored=RESTORED)
    return Termination.from_json(file.read_bytes())


def test_its_word_names_the_rank_and_the_signal(tmp_path: Path) -> None:
    file = tmp_path / "termination"
    file.touch()
    error = "rank 1 was ended by signal 11 (SIGSEGV)"
    assert killed(file) == Termination(code=139, step=12, restored=RESTORED, error=error, rank=1)


@pytest.mark.parametrize(
    ("earlier", "is_replaced"),
    [
        pytest.param(Termination(code=ExitCode.PEER_LOST, rank=0), True, id="another rank has lost one"),
        pytest.param(Termination(code=ExitCode.DONE, rank=0), True, id="another rank is done"),
        pytest.param(Termination(code=ExitCode.FENCED, rank=0), False, id="another rank was fenced"),
        pytest.param(Termination(code=ExitCode.PEER_LOST, rank=1), False, id="the rank has said why itself"),
        pytest.param(Termination(code=1, rank=1, restart=0), True, id="it was started anew since"),
    ],
)
def test_of_several_words_that_counts_which_tells_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: Termination, *, is_replaced: bool
) -> None:
    if earlier.restart is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    file = tmp_path / "termination"
    leave_last_word(file, earlier)
    assert (killed(file) != earlier) == is_replaced


class Stuck:
    """A training in a pod whose grace period is over, in a call."""

    def __init__(self, folder: Path) -> None:
        self.places = PodPaths(settings_folder=folder, termination_file=folder / "termination")
        self.waits = Waits()
        self.saver = SimpleNamespace(
            failures=SimpleNamespace(fence=None),
            cost=None,
            lineage=SimpleNamespace(own_commit=None, restored_commit=None),
        )
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
    stuck.saver.failures.fence = fence
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


class Clock:
    """Advances by what each part is given, which uses all of it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.given: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def use(self, *given: Any) -> None:
        self.given.append(given[-1])
        self.now_s += max(0.0, given[-1])


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER_LOST, 1])
@pytest.mark.parametrize("limit_s", [9.0, 4.0, 0.9, 0.0])
def test_all_parts_together_end_in_the_time_of_one_deadline(
    monkeypatch: pytest.MonkeyPatch, code: int, limit_s: float
) -> None:
    clock, part = Clock(), SimpleNamespace
    monkeypatch.setattr(closing, "time", clock)
    parts: list[Any] = [
        part(close=clock.use, process_exit=part(is_pods=False)),
        part(
            close=clock.use, await_hooks=clock.use, failures=part(on_fence=lambda _tell, *, is_pods: is_pods)
        ),
        part(send_latest_step=list),
        part(close=clock.use),
        part(announce_leave=clock.use, abort=list, leave=clock.use),
    ]
    Closing(*parts)._close_parts(code, None, clock.now_s + limit_s)
    assert clock.now_s <= 100.0 + limit_s + 1e-6
    assert all(given >= 0 for given in clock.given)
    if limit_s:
        assert all(given > 0 for given in clock.given[:4]), "each of these has something to do"
