"""Trainers and companions of one and two ranks are killed at random moments; each next start has the newest commit.

At each of their storage operations they are killed by `test_manager_killed_anywhere.py`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from stepkeeper.log import BeginEntry, Log
from stepkeeper.storage import Store, open_store

RANK: Final = Path(__file__).parent / "manager_trainer" / "rank.py"
PATIENCE_S: Final = 90.0
N_KILLS: Final = int(os.environ.get("STEPKEEPER_KILLS", "30"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """All ranks of one start of the job, and what they say."""

    processes: "list[subprocess.Popen[bytes]]"
    outputs: list[Path]

    def said(self, event: str) -> dict[str, Any] | None:
        """Return rank 0's first line of that event, if there is one by now."""
        lines = self.outputs[0].read_text().splitlines(keepends=True)
        said = [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]
        return next((each for each in said if each["event"] == event), None)

    def hear_start(self) -> dict[str, Any]:
        """Return what rank 0 prints once it has restored."""
        wait_for(lambda: self.said("start") is not None, self)
        said = self.said("start")
        assert said is not None
        return said

    def companions(self) -> list[int]:
        """Their pids."""
        found = []
        for process in self.processes:
            for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
                found += [int(pid) for pid in task.read_text().split() if is_companion(int(pid))]
        return found

    def check_running(self) -> None:
        for process, output in zip(self.processes, self.outputs, strict=True):
            assert process.poll() is None, output.read_text()[-3000:]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def is_companion(pid: int) -> bool:
    try:
        return b"stepkeeper.companion" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def start(folder: Path, world_size: int) -> Iterator[Start]:
    """Start that many ranks, which train on and save every other step."""
    folder.mkdir()
    uri = (folder.parent / "root").as_uri()
    options = json.dumps({"interval": 2, "pause_s": 0.002})
    running = Start(processes=[], outputs=[folder / f"{rank}.txt" for rank in range(world_size)])
    try:
        for rank, output in enumerate(running.outputs):
            command = [
                sys.executable,
                str(RANK),
                uri,
                str(rank),
                str(world_size),
                str(folder),
                "1000000",
                options,
            ]
            with output.open("w") as stream:
                running.processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))
        yield running
    finally:
        running.kill()


def wait_for(condition: Callable[[], bool], start: Start | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        if start is not None:
            start.check_running()
        time.sleep(0.02)


def check_restored(store: Store, said: dict[str, Any]) -> None:
    """The start goes on from the newest commit that there was when it began, with that commit's values."""
    log = Log(store)
    state = log.open()
    begin = state.claim
    assert begin is not None
    body = log.entry(begin).body
    assert isinstance(body, BeginEntry)
    # No retention here: all that was ever committed is in the state.
    before = [slot for slot in state.commits if slot < begin]
    assert body.base == max(before, default=None)
    step = 0 if body.base is None else state.commits[body.base].step
    assert {name: said[name] for name in ("step", "a", "b", "value")} == {
        "step": step,
        "a": step,
        "b": step,
        "value": step,
    }


def head(store: Store) -> int:
    slot = Log(store).open().head
    return -1 if slot is None else slot


def kill_one(running: Start, store: Store, chance: random.Random) -> str:
    """After a random time one of the processes is killed; what was killed."""
    time.sleep(chance.uniform(0, 0.8))
    companions = running.companions()
    victims = {f"trainer {rank}": each.pid for rank, each in enumerate(running.processes)}
    victims |= {f"companion {number}": pid for number, pid in enumerate(companions)}
    victim = chance.choice(sorted(victims))
    os.kill(victims[victim], signal.SIGKILL)
    if victim.startswith("companion"):
        # The trainers go on with another one, and their next commit goes in.
        slot = head(store)
        wait_for(lambda: head(store) > slot, running)
    else:
        time.sleep(chance.uniform(0, 0.3))
    return victim


def kill_again_and_again(tmp_path: Path, n_kills: int) -> None:
    seed = int(os.environ.get("STEPKEEPER_SEED", "0")) or int.from_bytes(os.urandom(4))
    print(f"STEPKEEPER_SEED={seed}")
    chance = random.Random(seed)
    store = open_store((tmp_path / "root").as_uri())
    told = -1
    for number in range(n_kills + 1):
        world_size = chance.choice([1, 2])
        with start(tmp_path / f"start-{number}", world_size) as running:
            said = running.hear_start()
            check_restored(store, said)
            assert said["step"] >= told
            if number == n_kills:
                break
            if number == 0:
                wait_for(lambda: head(store) >= 0, running)
            latest = Log(store).open().latest
            told = -1 if latest is None else latest.step
            print(f"start {number} of {world_size} ranks, from step {said['step']}: ", end="")
            print(kill_one(running, store, chance))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_each_start_after_many_kills_has_the_newest_commit(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, N_KILLS)
