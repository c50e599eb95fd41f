"""The termination message: which of two stands, what a killed process leaves, and what the kernel knows of it."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stepkeeper.contract import CommitPoint, EndKind, ExitCode, Termination
from stepkeeper.ending.message import write, write_for_killed
from stepkeeper.kernel_record import KernelRecord
from stepkeeper_testing.pod import pod_identity


def test_a_last_word_can_be_read_whenever_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "termination"
    first = Termination(
        code=75, kind="saved", step=7, notice="sigterm", error="a long story, which ends well"
    )
    second = Termination(code=0, kind="done", step=8)
    write(path, first)
    assert Termination.from_json(path.read_bytes()) == first

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for moment, left in (("pwrite", first), ("ftruncate", second)):
        with monkeypatch.context() as patched:
            patched.setattr(f"os.{moment}", killed)
            with pytest.raises(KeyboardInterrupt):
                write(path, second)
        assert Termination.from_json(path.read_bytes()) == left
    write(path, second)
    assert path.read_bytes() == second.to_json()


FIRST = "rank 2: ValueError"
STOPPED = Termination(code=75, kind="saved", step=7, rank=0)
FAILED = Termination(code=1, rank=2, first_failure=FIRST)


@pytest.mark.parametrize(
    ("words", "code", "first_failure"),
    [
        pytest.param([STOPPED, FAILED], 75, FIRST, id="what stands gets the first failure"),
        pytest.param([FAILED, Termination(code=77, rank=1)], 77, FIRST, id="which stays in what says more"),
        pytest.param(
            [FAILED, replace(FAILED, rank=0, first_failure="late")], 1, FIRST, id="and is the first"
        ),
    ],
)
def test_of_processes_side_by_side_that_word_stands_which_tells_most(
    tmp_path: Path, words: list[Termination], code: int, first_failure: str | None
) -> None:
    path = tmp_path / "termination"
    write(path, words[0])
    with path.open("rb") as held:
        # As by a process that was stopped at the wrong moment.
        fcntl.flock(held, fcntl.LOCK_EX)
        for word in words[1:]:
            write(path, word)
    said = Termination.from_json(path.read_bytes())
    assert (said.code, said.first_failure) == (code, first_failure)
    write(tmp_path, words[0])  # a folder can't be written to, which ends nothing


RESTORED = CommitPoint(sequence=1, step=10)


@contextmanager
def running(script: str = "read line") -> Iterator[tuple[subprocess.Popen[bytes], KernelRecord]]:
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as process:
        try:
            yield process, KernelRecord(process.pid)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGRTMIN + 2])
def test_the_signal_that_ended_a_process_can_be_read_until_its_parent_has_waited(number: int) -> None:
    with running() as (process, record):
        assert record.read_end_signal() is None, "it runs"
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its parent is yet to wait for it
        assert record.read_end_signal() == number
        process.wait()
        assert record.read_end_signal() is None


def killed(file: Path, number: int = signal.SIGSEGV) -> Termination:
    pod = pod_identity(termination_file=str(file))
    write_for_killed(pod, 1, number, step=12, restored=RESTORED)
    return Termination.from_json(file.read_bytes())


def test_its_word_names_the_rank_and_the_signal(tmp_path: Path) -> None:
    file = tmp_path / "termination"
    file.touch()
    error = "signal 11 (SIGSEGV) killed rank 1"
    assert killed(file) == Termination(
        code=139, kind=EndKind.KILLED, step=12, restored=RESTORED, error=error, first_failure=error, rank=1
    )


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
    write(file, earlier)
    assert (killed(file).kind == EndKind.KILLED) == is_replaced
