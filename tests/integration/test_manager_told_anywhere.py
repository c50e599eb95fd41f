"""Trainings of one to four ranks get SIGTERM at random moments, start after start: each goes on exactly there."""

import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last

from stepkeeper.contract import ExitCode, Termination
from stepkeeper.log import Log
from stepkeeper.storage import open_store

TRAINER: Final = Path(__file__).parent / "manager_trainer" / "told_anywhere.py"
N_STEPS: Final = 9
PATIENCE_S: Final = 240.0
MOMENTS: Final = (
    "restore",
    "before the first step",
    "compile",
    "transfer",
    "vote",
    "commit",
    "after the last step",
)
EACH: Final = 5
"""How often SIGTERM has to come in each of the moments, in the long test."""

Servers = tuple[ForkServer, ForkServer]


class Reference:
    """The states of an undisturbed training, which is computed as far as somebody asks."""

    def __init__(self) -> None:
        self._weight = torch.rand(64, 64, generator=torch.Generator().manual_seed(7))
        self._momentum = torch.zeros(64, 64)
        self._digests = [self._digest()]

    def digest(self, step: int) -> str:
        while len(self._digests) <= step:
            self._momentum = self._momentum * 0.9 + torch.sin(self._weight * 3.0)
            self._weight = self._weight - self._momentum * 0.01
            self._digests.append(self._digest())
        return self._digests[step]

    def _digest(self) -> str:
        data = self._weight.numpy().tobytes() + self._momentum.numpy().tobytes()
        return hashlib.sha256(data).hexdigest()


class Rank:
    """One rank, and a thread that hears what it says."""

    def __init__(self, server: ForkServer, folder: Path, rank: int, world_size: int, seed: int) -> None:
        options = json.dumps({"steps": N_STEPS, "seed": seed})
        self.log = folder / f"log.{rank}"
        with self.log.open("w") as log:
            self.process: ForkedProcess = server.start(
                [TRAINER, folder, rank, world_size, options], stdout=subprocess.PIPE, stderr=log
            )
        self.said: list[dict[str, Any]] = []
        self._came = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # Gloo says hello on stdout.
                with self._came:
                    self.said.append(json.loads(line))
                    self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    def wait_for_moment(self, name: str) -> None:
        with self._came:
            assert self._came.wait_for(
                lambda: self._ended or {"event": "in", "name": name} in self.said, PATIENCE_S
            ), (name, self.log.read_text()[-3000:])

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        return code

    def find(self, event: str) -> dict[str, Any] | None:
        return next((each for each in self.said if each["event"] == event), None)


def tell(ranks: list[Rank], moment: str, chance: random.Random) -> None:
    """Send SIGTERM to some of the ranks, one after the other or at once, the first of them in the `moment`."""
    victims = chance.sample(ranks, chance.randint(1, len(ranks)))
    victims[0].wait_for_moment(moment)
    time.sleep(chance.uniform(0, 0.05))
    for victim in victims:
        victim.process.send_signal(signal.SIGTERM)
        time.sleep(chance.choice([0.0, 0.0, chance.uniform(0, 0.3)]))


def check_end(root: Path, folder: Path, ranks: list[Rank], codes: list[int]) -> int:
    """Check that all ranks ended with one code and one commit, and return its step."""
    logs = "\n".join(f"{rank.log.read_text()[-1500:]}\n{rank.said[-6:]}" for rank in ranks)
    assert len(set(codes)) == 1, (codes, logs)
    assert codes[0] in (ExitCode.SAVED, ExitCode.DONE), (codes, logs)
    head = Log(open_store(root.as_uri())).open().latest
    assert head is not None, logs
    ends = [
        Termination.from_json((folder / f"termination.{number}").read_bytes()) for number in range(len(ranks))
    ]
    assert {end.committed.step for end in ends if end.committed is not None} == {head.step}, logs
    assert all(end.code == codes[0] for end in ends), logs
    stops = {said["step"] for rank in ranks if (said := rank.find("stops")) is not None}
    assert stops in (set(), {head.step}), logs
    if codes[0] == ExitCode.DONE:
        # Training was done before anybody had told all: what it saved is its last step.
        started = ranks[0].find("start")
        assert started is not None
        assert head.step == started["step"] + N_STEPS, logs
    return head.step


def run_again_and_again(servers: Servers, tmp_path: Path, n_runs: int) -> Counter[str]:
    """Run the training that often, and count the moments in which SIGTERM came."""
    seed = int(os.environ.get("STEPKEEPER_SEED", secrets.randbelow(2**32)))
    print(f"STEPKEEPER_SEED={seed}")
    chance = random.Random(seed)
    reference, root, step = Reference(), tmp_path / "root", 0
    counts: Counter[str] = Counter()
    for number in range(n_runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        world_size, moment = chance.choice([1, 2, 2, 3, 4]), MOMENTS[number % len(MOMENTS)]
        ranks = [
            Rank(servers[rank % 2], folder, rank, world_size, seed + number) for rank in range(world_size)
        ]
        with ended_at_last([rank.process for rank in ranks]):
            tell(ranks, moment, chance)
            codes = [rank.wait() for rank in ranks]
        for rank in ranks:
            start = rank.find("start")
            assert start == {"event": "start", "step": step, "held": step, "digest": reference.digest(step)}
        step = check_end(root, folder, ranks, codes)
        came = {name for rank in ranks if (told := rank.find("told")) for name in told["names"]}
        counts.update(came)
        print(f"run {number}: {world_size} ranks, {moment}: {sorted(came)}, {codes[0]} at step {step}")
    print(dict(counts))
    return counts


@pytest.mark.timeout(900)
def test_a_training_that_is_told_at_any_moment_goes_on_exactly_there(
    torch_servers: Servers, tmp_path: Path
) -> None:
    counts = run_again_and_again(torch_servers, tmp_path, 20)
    assert counts.total() > 0


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_200_trainings_that_are_told_at_any_moment_go_on_exactly_there(
    torch_servers: Servers, tmp_path: Path
) -> None:
    counts = run_again_and_again(torch_servers, tmp_path, 200)
    assert {name: counts[name] for name in MOMENTS if counts[name] < EACH} == {}
