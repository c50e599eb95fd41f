"""A training that is stopped by SIGTERM and killed goes on as if nothing had happened, to the last bit of its loss."""

import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepkeeper.contract import ExitCode

# Four trainings one after the other, each with a server of workers that imports torch once more.
pytestmark = pytest.mark.timeout(900)

SAVE_INTERVAL = 20
N_STEPS = 200
STEPS_PER_EPOCH = 78
_STEP = re.compile(r"step=(\d+) epoch=(\d+) loss=\S+ exact=(\S+)")
_MARK = "TEXT_LM_TEST_RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    exit_code: int
    started_from: int
    losses: dict[int, str]
    epochs: dict[int, int]


def line_by_line() -> tuple[int, int]:
    """Return the ends of a pipe that holds one line: who writes goes on once that is read, and is never far ahead."""
    reading, writing = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    return reading, writing


def train(
    root: Path,
    mark: str,
    *,
    kill_at: int | None = None,
    by: signal.Signals = signal.SIGKILL,
) -> Run:
    """One process trains until it ends by itself, or gets the signal right after it printed step `kill_at`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX2"
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": flags, _MARK: mark}
    command = [sys.executable, "-m", "text_lm", "--preset", "test", "--steps", str(N_STEPS)]
    command += ["--checkpoint-uri", root.as_uri()]
    errors = root.with_suffix(".stderr")
    losses: dict[int, str] = {}
    epochs: dict[int, int] = {}
    start = -1
    reading, writing = line_by_line()
    with (
        errors.open("a") as stderr,
        os.fdopen(reading) as said,
        subprocess.Popen(command, env=env, stdout=writing, stderr=stderr) as process,
    ):
        os.close(writing)
        try:
            for line in said:
                if line.startswith("start step="):
                    start = int(line.partition("=")[2])
                if found := _STEP.match(line):
                    step = int(found[1])
                    epochs[step], losses[step] = int(found[2]), found[3]
                    if step == kill_at:
                        process.send_signal(by)
            process.wait(200)
        finally:
            process.kill()
    assert start >= 0, errors.read_text()
    return Run(exit_code=process.returncode, started_from=start, losses=losses, epochs=epochs)


def test_losses_are_bit_equal_to_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    chance = random.Random(20)
    mark = str(uuid.uuid4())
    term_at = chance.randrange(25, STEPS_PER_EPOCH)
    kill_at = chance.randrange(
        STEPS_PER_EPOCH, N_STEPS - 40
    ) // SAVE_INTERVAL * SAVE_INTERVAL + chance.randrange(8, 12)

    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(train, tmp_path / "whole", mark)
        stopped = train(tmp_path / "disturbed", mark, kill_at=term_at, by=signal.SIGTERM)
        killed = train(tmp_path / "disturbed", mark, kill_at=kill_at)
        last = train(tmp_path / "disturbed", mark)
        whole = running.result()

    assert whole.exit_code == ExitCode.DONE
    assert sorted(whole.losses) == list(range(1, N_STEPS + 1))
    assert set(whole.epochs.values()) == {0, 1, 2}

    assert stopped.exit_code == ExitCode.SAVED
    assert max(stopped.losses) >= term_at
    assert killed.started_from == max(stopped.losses), (
        "what SIGTERM made it save is what the next one goes on from"
    )

    assert killed.exit_code == -signal.SIGKILL
    assert killed.started_from < last.started_from < max(killed.losses), (
        "a commit was resumed, and steps were lost"
    )

    assert last.exit_code == ExitCode.DONE
    assert max(last.losses) == N_STEPS
    for run in (stopped, killed, last):
        assert min(run.losses) == run.started_from + 1
        assert run.losses == {step: whole.losses[step] for step in run.losses}
        assert run.epochs == {step: whole.epochs[step] for step in run.losses}
    assert {*stopped.losses, *killed.losses, *last.losses} == set(whole.losses)
