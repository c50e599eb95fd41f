# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""The end of a process: its exit code and termination message, and that nothing delays it."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepkeeper import CheckpointManager, loggers
from stepkeeper.contract import (
    SETTINGS_FILE_NAME,
    Cause,
    EndKind,
    EveryInterval,
    ExitCode,
    Interval,
    NoticeSource,
    Settings,
    Termination,
)
from stepkeeper.ending import watch as ending_watch
from stepkeeper.ending.exits import exit_code_of, find_end, find_known_cause
from stepkeeper.ending.watch import EndWatch
from stepkeeper.errors import (
    CompanionLostError,
    FencedError,
    NoticeDeadlineError,
    OtherJobsRootError,
    PartlyRestoredError,
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
from stepkeeper.save.persist import _join_refusals
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_environ, pod_identity


def partly_by(cause: BaseException) -> PartlyRestoredError:
    error = PartlyRestoredError("the state has parts of step 2")
    error.__cause__ = cause
    return error


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
        (partly_by(PeerLostError("rank 1 is lost")), ExitCode.PEER_LOST),
        (partly_by(ValueError("not this")), 1),
        (partly_by(KeyboardInterrupt()), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(find_end(error)) == code


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
        ((CompanionLostError("gone"), StorageError("full")), SaveError),
        ((CompanionLostError("gone"), OtherJobsRootError("another job")), FencedError),
        ((CompanionLostError("gone"),), CompanionLostError),
    ],
)
def test_all_ranks_hear_that_the_store_was_away(
    refusals: tuple[Exception, ...], kind: type[StepkeeperError]
) -> None:
    joined = _join_refusals(7, dict(enumerate(refusals)))
    assert type(joined) is kind
    assert type(decode_error(encode_error(joined))) is kind


class Watched:
    """A training in a pod of which a notice leaves nothing."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(
            uri=(folder / "root").as_uri(), interval=Interval(every=EveryInterval(steps=1000))
        )
        (folder / SETTINGS_FILE_NAME).write_bytes(settings.to_json())
        self.places = PodPaths(settings_folder=folder, termination_file=folder / "termination")
        with pytest.MonkeyPatch.context() as pod:
            for name, value in pod_environ(pod_identity(grace_s=0)).items():
                pod.setenv(name, value)
            self.manager = CheckpointManager.from_env(_places=self.places)
        self.parts = self.manager._parts
        self.watch = self.parts.ending._watch
        # Its own thread would end this process, the tests', five times a second.
        self.watch.notices.close()

    def end_stuck(self) -> None:
        self.watch.notices.record(NoticeSource.SIGTERM)
        with self.parts.waits.in_call():
            self.watch._on_tick()

    def message_of(
        self, code: int, error: str | None = None, failure: BaseException | None = None
    ) -> Termination:
        self.watch.write_message(code, error, failure=failure)
        return self.message

    @property
    def message(self) -> Termination:
        return Termination.from_json(self.places.termination_file.read_bytes())


def test_the_message_names_the_cause_of_a_failure_and_of_no_other_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.message_of(1, failure=AWAY[0]).cause == Cause.STORAGE_UNAVAILABLE
    assert watched.message_of(1, failure=ValueError("a bug")).cause is None
    assert watched.message_of(78, failure=AWAY[0]).cause is None


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        (ValueError("the loss is no number"), "rank 0: ValueError: the loss is no number"),
        (RuntimeError("CUDA error\nCompile with TORCH_USE_CUDA_DSA"), "rank 0: RuntimeError: CUDA error"),
        (OSError("no such file: '/d/\udcff'"), "rank 0: OSError: no such file: '/d/?'"),
    ],
)
def test_the_message_names_the_failure_in_a_line(tmp_path: Path, failure: Exception, name: str) -> None:
    assert Watched(tmp_path).message_of(1, "a traceback", failure=failure).first_failure == name


def test_nothing_is_written_of_a_stop_once_it_is_known_how_the_process_ends(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    said = [watched.message_of(code) for code in (75, 1, 75, 77)]
    assert [(each.code, each.kind) for each in said] == [
        (75, EndKind.STOPPING),
        (1, EndKind.FAILED),
        (1, EndKind.FAILED),
        (77, EndKind.FENCED),
    ]
    watched.watch.ending = watched.watch.ending.on_stop_tried(None).leave().on_closed()
    assert watched.message_of(75).kind == EndKind.SAVED, "it had the root again, and has ended otherwise"


@pytest.mark.parametrize(
    ("loss", "kind"), [(None, EndKind.SAVED), ("step 7 is not saved for the notice", EndKind.GAVE_UP)]
)
def test_a_stop_says_at_which_step_and_whether_that_is_saved(
    tmp_path: Path, loss: str | None, kind: EndKind
) -> None:
    watched = Watched(tmp_path)
    ending = watched.watch.ending.reach(7).stop()
    watched.watch.ending = ending.on_stop_tried("503", may_retry=True).on_stop_tried(loss)
    said = watched.message_of(75)
    assert (said.kind, said.agreed_step, said.decision) == (kind, 7, "the last save was tried 2 times")


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(loggers, "_BRIEF_S", 60.0)
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
    tmp_path: Path, codes: list[int], fence: FencedError | None, loss: StepkeeperError | None, code: ExitCode
) -> None:
    stuck = Watched(tmp_path)
    if fence is not None:
        stuck.parts.saver.failures.record_fence(fence)
    if loss is not None:
        stuck.parts.waits.end_all(loss)
    stuck.end_stuck()
    assert codes == [code]
    assert stuck.message.code == code
    assert stuck.message.error == (str(fence or loss) if fence or loss else None)


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
    monkeypatch.setattr(loggers, "_BRIEF_S", 0.001)
    handler, package = Hanging(), logging.getLogger("stepkeeper")
    package.addHandler(handler)
    yield handler
    handler.free.set()
    package.removeHandler(handler)
    for thread in threading.enumerate():
        if thread.name == "stepkeeper-brief":
            thread.join(60)


def test_a_log_that_hangs_holds_up_neither_the_stop_nor_the_end(
    tmp_path: Path, codes: list[int], hanging: Hanging
) -> None:
    stuck = Watched(tmp_path)
    stuck.end_stuck()
    assert stuck.parts.steps.decider.agreement.agreed_stop is not None
    assert stuck.manager.health().notice == "sigterm"
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
    clock = Clock()
    part: Any = SimpleNamespace
    monkeypatch.setattr(ending_watch, "time", clock)
    watch: Any = object.__new__(EndWatch)
    watch.notices = watch._announcements = part(close=list)
    watch._parts = part(
        steps=part(decider=part(agreement=part(close=clock.use))),
        saver=part(close=clock.use, await_hooks=clock.use),
        progress=part(send_latest_step=list),
        companion=part(close=clock.use),
        rank_group=part(announce_leave=clock.use, abort=list, leave=clock.use),
    )
    watch._close_parts(code, None, clock.now_s + limit_s)
    assert clock.now_s <= 100.0 + limit_s + 1e-6
    assert all(given >= 0 for given in clock.given)
    if limit_s:
        assert all(given > 0 for given in clock.given[:4]), "each of these has something to do"
