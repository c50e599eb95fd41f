"""Test what is left of a process that a signal has ended: the kernel's record of it, and its last word."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepkeeper.contract import CommitPoint, ExitCode, Termination
from stepkeeper.process_end.kernel_record import KernelRecord
from stepkeeper.process_end.killed import leave_word_of_killed
from stepkeeper.process_end.last_words import leave_last_word
from stepkeeper_testing.pod import pod_identity

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


def test_a_stopped_process_was_ended_by_no_signal() -> None:
    with running() as (process, record):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
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


def test_a_signal_without_a_name_has_its_place_among_those(tmp_path: Path) -> None:
    file = tmp_path / "termination"
    file.touch()
    number = signal.SIGRTMIN + 2
    assert killed(file, number).error == f"rank 1 was ended by signal {number} (SIGRTMIN+2)"


def test_no_file_is_made_where_no_kubelet_looks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        killed(tmp_path / "termination")


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
