"""`python -m stepkeeper.launch` ends with the code that the training meant, with a real torchrun and real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from launched_pods import PATIENCE_S, launched, lose, pods, torchrun, until_running
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper.contract import ExitCode
from stepkeeper_testing.left_behind import head_of, last_word


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ([], 2, "usage: python -m stepkeeper.launch COMMAND"),
        (["no-such-program"], 127, "program 'no-such-program' not found"),
        (["--", "/"], 126, "starting '/' failed"),
    ],
)
def test_a_command_that_is_none_is_named(command: list[str], code: int, said: str) -> None:
    with launched(*command) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert f"stepkeeper.launch: {said}" in output


@contextmanager
def two_pods(tmp_path: Path, case: str, **options: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """The launchers of two pods, with two workers each, which train when the block begins.

    When it ends well, both have ended with 75, and the last word of each tells the newest commit.
    """
    made = pods(tmp_path, 2, coordinator="lm-w-0-0.lm" if options else "localhost")
    folders = [folder for folder, _ in made]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                launched(*torchrun(folder, case), env=env, output=folder / "output", **options)
            )
            for folder, env in made
        ]
        for number, (process, folder) in enumerate(zip(processes, folders, strict=True)):
            until_running(process, [folder / f"runs-{rank}" for rank in (2 * number, 2 * number + 1)])
        yield processes
        codes = [process.wait(PATIENCE_S) for process in processes]
    said = [(folder / "output").read_text() for folder in folders]
    assert codes == [75, 75], said
    latest = head_of(tmp_path)
    words = [last_word(folder) for folder in folders]
    assert [(word.code, word.step, word.agreed_step, word.restart) for word in words] == [
        (75, latest.step, latest.step, 0)
    ] * 2, said


def test_two_pods_of_two_workers_end_with_75_when_one_is_told_to_stop(tmp_path: Path) -> None:
    with two_pods(tmp_path, "trains") as (_, other):
        other.send_signal(signal.SIGTERM)
    for number in range(2):
        said = (tmp_path / f"pod-{number}" / "output").read_text()
        assert "exited with code 1, the training with 75" in said


def test_a_stops_save_is_committed_though_the_pods_names_are_gone(tmp_path: Path) -> None:
    """Who deletes a job takes its Service away, and with it the names of its pods, before their processes are told."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost lm-w-0-0.lm\n")
    with two_pods(tmp_path, "trains", hosts=hosts) as both:
        hosts.write_text("127.0.0.1 localhost\n")
        for process in both:
            process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("case", ["asks", "saves-slowly"])
def test_no_rank_ends_before_the_stops_save_is_committed(tmp_path: Path, case: str) -> None:
    """torchrun ends all ranks of a pod once one has ended. A program asks for the stop; or both pods are deleted."""
    with two_pods(tmp_path, case) as (one, other):
        if case == "saves-slowly":
            one.send_signal(signal.SIGTERM)
            time.sleep(1.0)
            other.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_loads_the_data_isnt_told_before_the_save_is_done(tmp_path: Path, method: str) -> None:
    """torchrun hands SIGTERM on to whole sessions, and torch fails a rank whose loaders die."""
    ((folder, env),) = pods(tmp_path, 1)
    output = folder / "output"
    with launched(*torchrun(folder, f"loads-{method}"), env=env, output=output) as process:
        until_running(process, [folder / f"runs-{rank}" for rank in (0, 1)])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 75, output.read_text()
    word = last_word(folder)
    assert word.committed is not None, output.read_text()
    assert word.committed.step == word.step


@pytest.mark.smoke
def test_a_crash_is_the_pods_own_and_its_rank_and_signal_are_told(tmp_path: Path) -> None:
    """The other rank of the pod only knows that it has lost one, which is no failure of its own."""
    ((folder, env),) = pods(tmp_path, 1)
    output = folder / "output"
    (folder / "termination").touch()  # as the kubelet does
    with launched(*torchrun(folder, "crashes"), env=env, output=output) as process:
        code = process.wait(PATIENCE_S)
    word = last_word(folder)
    assert (code, word.code, word.rank) == (139, 139, 1), (word, output.read_text())
    assert word.error == "signal 11 (SIGSEGV) killed rank 1"


def test_pods_that_lose_rank_0_while_their_workers_form_the_group_end_with_78(tmp_path: Path) -> None:
    (first, first_env), (second, second_env) = pods(tmp_path, 2)
    outputs = [folder / "output" for folder in (first, second)]
    with (
        launched(*torchrun(first, "never-joins"), env=first_env, output=outputs[0]) as one,
        launched(*torchrun(second, "never-joins"), env=second_env, output=outputs[1]) as other,
    ):
        until_running(one, [first / "runs-0"])
        until_running(other, [second / "joins-2", second / "joins-3"])
        lose(one)
        assert other.wait(PATIENCE_S) == 78, outputs[1].read_text()
    word = last_word(second)
    assert (word.code, word.restart) == (78, 0)
    assert "rank 0's launcher, which has the store, was lost while the process group was formed" in (
        word.error or ""
    )


@pytest.mark.parametrize("waits", [False, True], ids=["it-is-loaded", "it-waits-for-others"])
def test_a_pod_that_is_told_to_stop_before_torchrun_has_started_workers_ends_with_75(
    tmp_path: Path, waits: bool
) -> None:
    """torchrun has no handler of the signal yet, and dies of it. Another pod's image is still being pulled."""
    (folder, env), _ = pods(tmp_path, 2)
    output = folder / "output"
    with launched(*torchrun(folder, "trains"), env=env, output=output) as process:
        until_started(process, int(env["STEPKEEPER_COORDINATOR_PORT"]) if waits else None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 75, output.read_text()
    word = last_word(folder)
    assert (word.code, word.notice, word.step) == (75, "sigterm", None)


def until_started(process: subprocess.Popen[str], port: int | None) -> None:
    """The launcher has started torchrun; and that waits for others at the store on `port`, if one is given."""
    deadline = time.monotonic() + PATIENCE_S
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        assert (process.poll(), time.monotonic() < deadline) == (None, True)
        time.sleep(0.01)
    if port is not None:
        TCPStore("127.0.0.1", port, wait_for_workers=False)


SCRIPT = Path(__file__).parent / "launching" / "spawning.py"


def hear(process: subprocess.Popen[str], event: str) -> list[dict[str, object]]:
    """What both ranks say of that event."""
    assert process.stdout is not None
    said = (json.loads(line) for line in process.stdout if line.startswith("{"))
    return list(islice((each for each in said if each["event"] == event), 2))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("method", "starter"),
    [
        ("spawn", ["-m", "stepkeeper.launch", sys.executable]),
        ("fork", []),
        pytest.param("spawn", [], marks=pytest.mark.long),
        pytest.param("forkserver", ["-m", "stepkeeper.launch", sys.executable], marks=pytest.mark.long),
    ],
)
def test_processes_whose_parent_dies_of_sigterm_save_one_step(
    tmp_path: Path, method: str, starter: list[str]
) -> None:
    """torch.multiprocessing has SIGINT sent to them then."""
    ((folder, env),) = pods(tmp_path, 1)
    process = subprocess.Popen(
        [sys.executable, *starter, str(SCRIPT), str(folder), method],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert len(hear(process, "runs")) == 2
        process.send_signal(signal.SIGTERM)
        stops = {said["step"] for said in hear(process, "stops")}
        # Its end of the pipe is closed when the last of them has ended.
        assert process.communicate(timeout=PATIENCE_S)
        assert process.returncode == (ExitCode.SAVED if starter else -signal.SIGTERM)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert stops == {head_of(tmp_path).step}
    word = last_word(folder)
    assert word.code == ExitCode.SAVED
    assert word.notice in {"sigterm", "peer"}, "both ranks are told, and either may leave the last word"
