"""The exit code and the words that an exception leads to."""

import fcntl
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import ExitCode, Interval, Settings, Termination
from stepkeeper.errors import FencedError, NoticeDeadlineError, OtherJobsRootError, PeerLostError, SaveError
from stepkeeper.process_end.last_words import leave_last_word
from stepkeeper.training.environment import Environment, PodPaths
from stepkeeper.training.grace_period import GracePeriod
from stepkeeper.training.notices.watcher import Notice, NoticeWatcher
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


def test_nothing_is_written_of_a_stop_once_it_is_known_how_the_process_ends(tmp_path: Path) -> None:
    places = PodPaths(settings_folder=tmp_path, termination_file=tmp_path / "termination")
    settings = Settings(uri="file:///root", interval=Interval(steps=1))
    ending = ProcessExit(
        Environment(identity=pod_identity(), settings=settings, places=places),
        cast(Companion, SimpleNamespace(claimed_root=None)),
        cast(Progress, SimpleNamespace(step=7)),
        notices := cast(NoticeWatcher, SimpleNamespace(notice=None, notices=())),
        GracePeriod(30, notices),
        rank=0,
    )

    def code_after(code: int, *, is_final: bool) -> int:
        ending.write_termination_message(code, committed=None, restored=None, is_final=is_final)
        return Termination.from_json(places.termination_file.read_bytes()).code

    assert code_after(75, is_final=False) == 75
    assert code_after(1, is_final=True) == 1
    assert code_after(75, is_final=False) == 1
    assert code_after(77, is_final=True) == 77


@pytest.mark.parametrize(("source", "grace_s"), [("call", 30), ("directive", 30), ("sigterm", None)])
def test_what_a_program_does_behind_the_block_takes_its_time_unless_it_is_to_be_killed_at_a_known_time(
    source: str, grace_s: int | None
) -> None:
    notice = Notice(source=source, monotonic_s=time.monotonic())
    notices = cast(NoticeWatcher, SimpleNamespace(notice=notice, notices=(notice,)))
    ending = ProcessExit(
        None, cast(Companion, None), cast(Progress, None), notices, GracePeriod(grace_s, notices), rank=0
    )
    with ending.end_in_time(75, for_good=True):
        watching = [each for each in threading.enumerate() if each.name == "stepkeeper-end"]
    for thread in watching:
        thread.join(60)
        assert not thread.is_alive(), "it ends the process later"
