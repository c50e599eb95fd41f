"""`stepkeeper run` and `stepkeeper rehearse`, with real processes and signals."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from page_blocks import ROOT, read_blocks

from stepkeeper_testing.left_behind import head_of
from stepkeeper_testing.terminal import PATIENCE_S, Terminal

TRAINING = Path(__file__).parent / "supervised" / "training.py"
STEPKEEPER = "from stepkeeper.cli import main; main()"
FOREVER = 10**6
BECOME_BASH = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"
RUN_WITHOUT_WAITS = """
import sys
from stepkeeper.contract import EveryInterval, HangLimits, Interval, RestartLimits, Settings
from stepkeeper.supervise.attempt import build_command
from stepkeeper.supervise.supervisor import RunOptions, Supervisor
from stepkeeper.supervise.terminal import RunTerminal

uri, *words = sys.argv[1:]
options = RunOptions(
    command=build_command(words, 1),
    settings=Settings(uri=uri, interval=Interval(every=EveryInterval(steps=5)), hang=HangLimits()),
    limits=RestartLimits(max_failures=2, initial_wait_s=0),
)
sys.exit(Supervisor(options, RunTerminal()).run())
"""
"""`stepkeeper run` whose restarts come at once."""


Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(*command, case=…): a command that starts the training, whose folder is tmp_path."""
    started: list[Terminal] = []

    def start(
        *words: object, case: str = "plain", n_steps: int = FOREVER, code: str = STEPKEEPER
    ) -> Terminal:
        # Tests inherit ignored signals from nohup, or from a shell that has started them in the background.
        command = [
            "env",
            "--default-signal=INT,HUP",
            sys.executable,
            "-c",
            code,
            *words,
            TRAINING,
            tmp_path,
            n_steps,
            case,
        ]
        (tmp_path / "tmp").mkdir(exist_ok=True)
        process = subprocess.Popen(
            list(map(str, command)),
            # The folders of all processes' attempts are in it: by that they are found.
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(Terminal(process))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        for pid in list_processes(tmp_path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.end()
        print(each.text)


def list_processes(folder: Path) -> list[int]:
    """The processes of trainings that were started in `folder`."""
    mark, found = f"STEPKEEPER_ATTEMPT_FOLDER={folder}/tmp/".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def until_none_is_left(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := list_processes(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@contextmanager
def nobody_left(folder: Path) -> Iterator[None]:
    yield
    assert list_processes(folder) == []


def pid_of(folder: Path, rank: int = 0) -> int:
    return int((folder / f"pid-{rank}").read_text())


def run_into(folder: Path, *options: object) -> list[object]:
    return ["run", "--root", folder / "root", "--save", 5, *options]


def start_hanging(start: Start, folder: Path, *, grace_s: int) -> Terminal:
    run = start(*run_into(folder, "--grace", grace_s), case="hangs")
    while not (folder / "hangs").exists():
        time.sleep(0.05)
    return run


@pytest.mark.smoke
def test_ctrl_c_saves_and_stops_and_the_same_command_continues(tmp_path: Path, start: Start) -> None:
    with nobody_left(tmp_path):
        first = start(*run_into(tmp_path))
        first.until("step 5 committed")
        first.process.send_signal(signal.SIGINT)
        assert first.end() == 75
    stopped = head_of(tmp_path).step
    assert "Ctrl-C: saving and stopping" in first.text
    assert f"last checkpoint: step {stopped}, file://" in first.text
    second = start(*run_into(tmp_path), n_steps=stopped + 3)
    assert second.end() == 0
    assert f"training continues after step {stopped}" in second.text
    assert re.search("3 steps, [12] checkpoints?, 0 restarts", second.text)
    assert head_of(tmp_path).step == stopped + 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_other_signals_are_notices_too(tmp_path: Path, start: Start, number: int) -> None:
    run = start(*run_into(tmp_path))
    run.until("step 5 committed")
    run.process.send_signal(number)
    assert run.end() == 75
    assert "saved and stopped. The same command continues" in run.text
    assert int(re.findall(r"([0-9]+) steps, ", run.text)[0]) == head_of(tmp_path).step


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, start: Start) -> None:
    with nobody_left(tmp_path):
        run = start_hanging(start, tmp_path, grace_s=600)
        run.process.send_signal(signal.SIGINT)
        run.until("again to end at once")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130


def test_further_ctrl_cs_leave_nothing_out(tmp_path: Path, start: Start) -> None:
    with nobody_left(tmp_path):
        run = start_hanging(start, tmp_path, grace_s=600)
        while run.process.poll() is None and "last checkpoint: " not in run.text:
            run.process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        run.end()
        assert "stepkeeper: ended at once" in run.text
        assert not list((tmp_path / "tmp").glob("stepkeeper-run-*"))


def test_what_has_not_stopped_in_its_time_is_killed(tmp_path: Path, start: Start) -> None:
    with nobody_left(tmp_path):
        run = start_hanging(start, tmp_path, grace_s=2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75
    assert "the last step isn't saved" in run.text


def test_a_hang_is_named_and_ends_nothing(tmp_path: Path, start: Start) -> None:
    # Few steps are timed between saves that come so often: until some are, the limit is that of the start.
    code = RUN_WITHOUT_WAITS.replace("HangLimits()", "HangLimits(startup_s=5, after_s=5)")
    run = start((tmp_path / "root").as_uri(), case="hangs", code=code)
    run.until("in disturb: time.sleep")
    assert "the training hangs (Code), because " in run.text
    run.process.send_signal(signal.SIGINT)
    run.until("again to end at once")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130


def test_a_crash_is_a_failure_after_which_the_latest_commit_is_resumed(tmp_path: Path, start: Start) -> None:
    run = start((tmp_path / "root").as_uri(), case="crashes-once", n_steps=12, code=RUN_WITHOUT_WAITS)
    assert run.end() == 0
    assert "exited with code 1: ValueError: a bad batch (ApplicationError): restart at once" in run.text
    assert "training continues after step 5" in run.text
    assert "12 steps, 3 checkpoints, 1 restart (1 ApplicationError); lost 1 step and " in run.text


@pytest.mark.smoke
def test_a_crash_loop_uses_the_budget_up(tmp_path: Path, start: Start) -> None:
    run = start((tmp_path / "root").as_uri(), case="crashes-at-once", code=RUN_WITHOUT_WAITS)
    assert run.end() == 1
    assert "No restart is left after ApplicationError: 2 are allowed" in run.text
    assert "2 restarts (2 ApplicationError)" in run.text


def test_ctrl_c_before_a_restart_ends_the_run(tmp_path: Path, start: Start) -> None:
    run = start(*run_into(tmp_path), case="crashes-at-once")
    run.until("restart in 10 s")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 75
    assert "stopped before the restart" in run.text


@pytest.mark.parametrize("killed", ["trainer", "launcher"])
def test_a_killed_process_is_replaced_and_leaves_none(tmp_path: Path, start: Start, killed: str) -> None:
    with nobody_left(tmp_path):
        run = start((tmp_path / "root").as_uri(), n_steps=400, code=RUN_WITHOUT_WAITS)
        run.until("step 5 committed")
        pid = pid_of(tmp_path)
        if killed == "launcher":
            pid = int(re.findall(r"PPid:\t([0-9]+)", Path(f"/proc/{pid}/status").read_text())[0])
        os.kill(pid, signal.SIGKILL)
        run.until("training continues after step")
        run.process.send_signal(signal.SIGINT)
        assert run.end() in {0, 75}
    assert "was ended by SIGKILL" in run.text
    assert "1 restart (1 ApplicationError)" in run.text


@pytest.mark.parametrize("n_procs", [1, 2])
def test_the_end_of_the_supervisor_saves_and_stops_the_training(
    tmp_path: Path, start: Start, n_procs: int
) -> None:
    run = start(*run_into(tmp_path, "--nproc", n_procs))
    run.until("step 5 committed")
    run.process.kill()
    until_none_is_left(tmp_path)
    # Not a multiple of 5 but by chance: the step at which all ranks stopped.
    assert head_of(tmp_path).step > 5


def test_several_processes_stop_together_and_are_restarted_together(tmp_path: Path, start: Start) -> None:
    with nobody_left(tmp_path):
        run = start(*run_into(tmp_path, "--nproc", 2, "--max-failures", 1))
        run.until("step 5 committed")
        os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
        run.until("training continues after step")
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75
    assert "was ended by SIGKILL: signal 9 (SIGKILL) killed rank 1 (ApplicationError)" in run.text


def test_a_second_run_takes_the_root_and_the_first_one_ends(tmp_path: Path, start: Start) -> None:
    first = start(*run_into(tmp_path))
    first.until("step 5 committed")
    second = start(*run_into(tmp_path))
    assert first.end() == 77
    assert "Stop the other process that uses this root, or use another root" in first.text
    second.until(" committed")
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 75


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("root", "no-such-script.py"), "there is no file no-such-script.py"),
        (("root", "no-such-program"), "there is no program no-such-program"),
        ((TRAINING,), f"{TRAINING.name} is a file; a root is a folder"),
    ],
)
def test_what_no_start_could_use_is_refused(start: Start, words: tuple[object, ...], refusal: str) -> None:
    run = start("run", "--root", *words)
    assert run.end() == 2
    assert refusal in run.text


def test_the_batch_script_of_the_page_is_the_run_that_slurm_signals(tmp_path: Path, start: Start) -> None:
    """The page's own text, with this Python, a shorter interval, and the training here in place of `train.py`."""
    (block,) = (block for block in read_blocks("docs/user/slurm.md") if block.mark == "slurm")
    text = block.text
    for word, stand_in in {
        "stepkeeper": f"{sys.executable} -c '{STEPKEEPER}'",
        "runs/a": f"{tmp_path}/root --save 5",
        "--nproc 8": "--nproc 2",
        "train.py": f"{TRAINING} {tmp_path} {FOREVER} plain",
    }.items():
        assert text.count(word) == 1
        text = text.replace(word, stand_in)
    (tmp_path / "job.sh").write_text(text)
    with nobody_left(tmp_path):
        first = start(tmp_path / "job.sh", code=BECOME_BASH)
        first.until("step 5 committed")
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 75
    stopped = head_of(tmp_path).step
    second = start(tmp_path / "job.sh", code=BECOME_BASH)
    second.until(f"training continues after step {stopped}")
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 75


def test_the_quick_start(tmp_path: Path, start: Start) -> None:
    (block,) = (block for block in read_blocks("README.md") if block.mark == "quick-start")
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def does(line: str) -> Terminal:
        command = line.replace("stepkeeper", f"{sys.executable} -c '{STEPKEEPER}'", 1)
        return start("-c", f"cd {tmp_path}; exec {command}", code=BECOME_BASH)

    first, second, rehearsal = block.text.splitlines()
    run = does(first)
    run.until("step 60 committed")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 75
    run = does(second)
    assert run.end() == 0
    assert re.search("training continues after step 6[0-9]", run.text)
    run = does(rehearsal)
    assert run.end() == 0
    assert "of step 200, and loss of 200 steps, are equal bit for bit" in run.text


def rehearse(start: Start, case: str, *options: object) -> tuple[int, str]:
    run = start("rehearse", "--seed", 5, "--save", 7, *options, case=case, n_steps=40)
    return run.end(), run.text


@pytest.mark.parametrize("n_procs", [1, 2])
def test_a_training_that_resumes_exactly_is_found_to_do_so(
    tmp_path: Path, start: Start, n_procs: int
) -> None:
    code, text = rehearse(start, "plain", "--nproc", n_procs)
    assert code == 0, text
    # Two processes agree on the step after which they stop: the last notice may come too late.
    n_restarts = len(re.findall(r"\(SpotPreemption\): restart at once", text))
    assert n_restarts == 3 or (n_procs == 2 and n_restarts in {1, 2}), text
    assert "the training resumes exactly: " in text
    assert "and loss of 40 steps, are equal bit for bit" in text
    assert not list((tmp_path / "tmp").glob("stepkeeper-rehearsal-*"))


def test_a_training_that_forgets_its_random_numbers_is_found(start: Start) -> None:
    code, text = rehearse(start, "forgets-random")
    first = min(int(step) for step in re.findall(r"(?:notice|SIGKILL) at step ([0-9]+)", text))
    assert code == 1, text
    assert "the training doesn't resume exactly" in text
    (differs,) = re.findall(r"loss differs first, at step ([0-9]+): ", text)
    assert first - 7 < int(differs) <= first + 3
    assert "model.weight" in text
    assert "the state has no random numbers" in text
    assert "seed 5; the roots and outputs of both are in " in text


def test_a_training_that_cannot_resume_is_found(start: Start) -> None:
    code, text = rehearse(start, "cannot-resume")
    assert code == 1, text
    assert "the preempted training failed; the end of its output:" in text
    assert "ValueError: the data isn't there" in text


def test_without_metrics_the_states_alone_are_compared(start: Start) -> None:
    code, text = rehearse(start, "logs-nothing")
    assert code == 0, text
    assert "losses were not compared" in text
