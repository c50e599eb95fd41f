"""Trainings of one to four ranks get SIGTERM at random moments, start after start: each goes on exactly there."""

import json
import os
import random
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import pytest
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last, hear_rest

from stepkeeper.contract import ExitCode
from stepkeeper_testing.left_behind import head_of, last_word

TRAINER: Final = Path(__file__).parent / "manager_trainer" / "told_anywhere.py"
N_STEPS: Final = 9
MOMENTS: Final = (
    "restore",
    "before the first step",
    "compile",
    "transfer",
    "vote",
    "commit",
    "after the last step",
)
Servers = tuple[ForkServer, ForkServer]
Said = list[dict[str, Any]]


def hear_until(process: ForkedProcess, moment: str) -> Said:
    """Return what a rank says until it is in that moment, or ends."""
    said: Said = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):  # Gloo says hello on stdout.
            said.append(json.loads(line))
            if said[-1] == {"event": "in", "name": moment}:
                break
    return said


def tell(ranks: list[ForkedProcess], victims: list[int], moment: str, chance: random.Random) -> Said:
    """Send SIGTERM to some of the ranks, one after the other or at once, the first of them in the `moment`."""
    said = hear_until(ranks[victims[0]], moment)
    time.sleep(chance.uniform(0, 0.05))
    for victim in victims:
        ranks[victim].send_signal(signal.SIGTERM)
        time.sleep(chance.choice([0.0, 0.0, chance.uniform(0, 0.3)]))
    return said


def check_end(folder: Path, codes: list[int], heard: Said, step: int) -> int:
    """Check that all ranks have begun at `step` and ended with one commit, and return its step."""
    starts = [said for said in heard if said["event"] == "start"]
    assert starts == [{"event": "start", "step": step, "held": [step] * 3}] * len(codes)
    (code,) = set(codes)
    assert code in (ExitCode.SAVED, ExitCode.DONE)
    head = head_of(folder.parent)
    ends = [last_word(folder, number) for number in range(len(codes))]
    assert {end.code for end in ends} == {code}
    assert {end.committed.step for end in ends if end.committed is not None} == {head.step}
    assert {said["step"] for said in heard if said["event"] == "stops"} <= {head.step}
    if code == ExitCode.DONE:
        # Training was done before all were told: what it saved is its last step.
        assert head.step == step + N_STEPS
    return head.step


def run_again_and_again(servers: Servers, tmp_path: Path, n_runs: int) -> None:
    """Run the training that often. In the first run for each of the moments, it lasts until SIGTERM has come."""
    seed = int(os.environ.get("STEPKEEPER_SEED", secrets.randbelow(2**32)))
    print(f"STEPKEEPER_SEED={seed}")
    chance = random.Random(seed)
    step = 0
    for number in range(n_runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        moment = MOMENTS[number % len(MOMENTS)]
        # One rank alone has no vote.
        world_size = chance.choice([2, 2, 3, 4] if moment == "vote" else [1, 2, 2, 3, 4])
        victims = chance.sample(range(world_size), chance.randint(1, world_size))
        ranks = []
        for rank in range(world_size):
            stays = moment if rank == victims[0] and number < len(MOMENTS) else None
            options = {"steps": N_STEPS, "seed": seed + number, "stays_in": stays}
            with (folder / f"log.{rank}").open("w") as log:
                command = [TRAINER, folder, rank, world_size, json.dumps(options)]
                ranks.append(servers[rank % 2].start(command, stdout=subprocess.PIPE, stderr=log))
        with ended_at_last(ranks):
            heard = tell(ranks, victims, moment, chance)
            heard += [said for process in ranks for said in hear_rest(process)]
            codes = [process.wait() for process in ranks]
        print(f"run {number}: {world_size} ranks, {victims} told in {moment}: {codes}")
        logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("log.*"))
        try:
            step = check_end(folder, codes, heard, step)
        except Exception as error:
            error.add_note(logs)
            raise


@pytest.mark.timeout(900)
def test_a_training_that_is_told_at_any_moment_goes_on_exactly_there(
    torch_servers: Servers, tmp_path: Path
) -> None:
    run_again_and_again(torch_servers, tmp_path, 20)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_200_trainings_that_are_told_at_any_moment_go_on_exactly_there(
    torch_servers: Servers, tmp_path: Path
) -> None:
    run_again_and_again(torch_servers, tmp_path, 200)
