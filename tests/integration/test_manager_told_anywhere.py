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
from collections.abc import Callable
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
LOOK_S: Final = 0.05
"""Seconds after which a rank's end is noticed; what it says is heard at once."""

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

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        rank: int,
        world_size: int,
        options: dict[str, Any],
        came: threading.Condition,
    ) -> None:
        self.log = folder / f"log.{rank}"
        with self.log.open("w") as log:
            self.process: ForkedProcess = server.start(
                [TRAINER, folder, rank, world_size, json.dumps(options)], stdout=subprocess.PIPE, stderr=log
            )
        self.said: list[dict[str, Any]] = []
        self._came = came
        """Notified whenever a rank of this run has said something."""
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # Gloo says hello on stdout.
                with self._came:
                    self.said.append(json.loads(line))
                    self._came.notify_all()

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    def hear_rest(self) -> None:
        """Wait until all is heard of what the rank has said, which has ended."""
        self._thread.join(PATIENCE_S)

    def is_in(self, moment: str) -> bool:
        return {"event": "in", "name": moment} in self.said

    def find(self, event: str) -> dict[str, Any] | None:
        return next((each for each in self.said if each["event"] == event), None)


class Run:
    """The ranks of one start."""

    def __init__(
        self, servers: Servers, folder: Path, world_size: int, seed: int, *, stays: dict[int, str]
    ) -> None:
        self._came = threading.Condition()
        self.ranks = []
        for rank in range(world_size):
            options = {"steps": N_STEPS, "seed": seed, "stays_in": stays.get(rank)}
            self.ranks.append(Rank(servers[rank % 2], folder, rank, world_size, options, self._came))

    def wait_until(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait for that, at most until a rank ends as none may: the others might wait for it in vain."""
        ends_s = time.monotonic() + PATIENCE_S
        with self._came:
            while True:
                codes = {rank.code for rank in self.ranks}
                assert codes <= {None, ExitCode.SAVED, ExitCode.DONE}, f"until {what}:\n{self.logs()}"
                if is_so():
                    return
                assert time.monotonic() < ends_s, f"for {PATIENCE_S:g} s not yet: {what}\n{self.logs()}"
                self._came.wait(LOOK_S)

    def wait(self) -> int:
        """Wait until all ranks have ended, and return the code that they all have."""
        self.wait_until("all have ended", lambda: all(rank.code is not None for rank in self.ranks))
        for rank in self.ranks:
            rank.hear_rest()
        codes = {code for rank in self.ranks if (code := rank.code) is not None}
        assert len(codes) == 1, self.logs()
        return codes.pop()

    def logs(self) -> str:
        return "\n".join(
            f"--- rank {number}, code {rank.code}:\n{rank.log.read_text()[-3000:]}\n{rank.said[-6:]}"
            for number, rank in enumerate(self.ranks)
        )


def tell(run: Run, victims: list[int], moment: str, chance: random.Random) -> None:
    """Send SIGTERM to some of the ranks, one after the other or at once, the first of them in the `moment`."""
    first = run.ranks[victims[0]]
    run.wait_until(f"a rank is in {moment}", lambda: first.code is not None or first.is_in(moment))
    time.sleep(chance.uniform(0, 0.05))
    for victim in victims:
        run.ranks[victim].process.send_signal(signal.SIGTERM)
        time.sleep(chance.choice([0.0, 0.0, chance.uniform(0, 0.3)]))


def check_end(root: Path, folder: Path, run: Run, code: int) -> int:
    """Check that all ranks, which ended with that code, ended with one commit, and return its step."""
    ranks, logs = run.ranks, run.logs()
    head = Log(open_store(root.as_uri())).open().latest
    assert head is not None, logs
    ends = [
        Termination.from_json((folder / f"termination.{number}").read_bytes()) for number in range(len(ranks))
    ]
    assert {end.committed.step for end in ends if end.committed is not None} == {head.step}, logs
    assert all(end.code == code for end in ends), logs
    stops = {said["step"] for rank in ranks if (said := rank.find("stops")) is not None}
    assert stops in (set(), {head.step}), logs
    if code == ExitCode.DONE:
        # Training was done before anybody had told all: what it saved is its last step.
        started = ranks[0].find("start")
        assert started is not None
        assert head.step == started["step"] + N_STEPS, logs
    return head.step


def run_again_and_again(servers: Servers, tmp_path: Path, n_runs: int) -> Counter[str]:
    """Run the training that often, and count the moments in which SIGTERM came.

    In the first run for each of the moments, it lasts until SIGTERM has come.
    """
    seed = int(os.environ.get("STEPKEEPER_SEED", secrets.randbelow(2**32)))
    print(f"STEPKEEPER_SEED={seed}")
    chance = random.Random(seed)
    reference, root, step = Reference(), tmp_path / "root", 0
    counts: Counter[str] = Counter()
    for number in range(n_runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        moment = MOMENTS[number % len(MOMENTS)]
        # One rank alone has no vote.
        world_size = chance.choice([2, 2, 3, 4] if moment == "vote" else [1, 2, 2, 3, 4])
        victims = chance.sample(range(world_size), chance.randint(1, world_size))
        stays = {victims[0]: moment} if number < len(MOMENTS) else {}
        run = Run(servers, folder, world_size, seed + number, stays=stays)
        with ended_at_last([rank.process for rank in run.ranks]):
            tell(run, victims, moment, chance)
            code = run.wait()
        for rank in run.ranks:
            start = rank.find("start")
            assert start == {"event": "start", "step": step, "held": step, "digest": reference.digest(step)}
        step = check_end(root, folder, run, code)
        came = {name for rank in run.ranks if (told := rank.find("told")) for name in told["names"]}
        counts.update(came)
        print(f"run {number}: {world_size} ranks, {moment}: {sorted(came)}, {code} at step {step}")
    print(dict(counts))
    return counts


@pytest.mark.timeout(900)
def test_a_training_that_is_told_at_any_moment_goes_on_exactly_there(
    torch_servers: Servers, tmp_path: Path
) -> None:
    counts = run_again_and_again(torch_servers, tmp_path, 20)
    assert [name for name in MOMENTS if not counts[name]] == []


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_200_trainings_that_are_told_at_any_moment_go_on_exactly_there(
    torch_servers: Servers, tmp_path: Path
) -> None:
    counts = run_again_and_again(torch_servers, tmp_path, 200)
    assert {name: counts[name] for name in MOMENTS if counts[name] < EACH} == {}
