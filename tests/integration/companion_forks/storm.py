"""Fork workers at random moments around first saves and lost companions: storm.py FOLDER-URI SEED ROUNDS.

Each round has a manager of its own: its first save starts the companion, which is then killed at some moment of the
second save, and a later save starts another one. Prints what went wrong, one line for each round that did.
"""

import faulthandler
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from workers import end_workers, fork_worker, open_files, own_files, until

from stepkeeper import CheckpointManager
from stepkeeper.errors import CompanionLostError

_WAIT_S = 30.0
_ROUND_S = 150.0
_MOMENTS_S = 0.02
"""About as long as a save thread needs to start a companion."""


class Storm:
    """Fork for one manager."""

    def __init__(self, chance: random.Random, manager: CheckpointManager) -> None:
        self.chance = chance
        self.manager = manager
        self.workers: dict[int, bool] = {}
        """By pid, whether Python forked the worker."""
        self.programs: list[subprocess.Popen[bytes]] = []

    def fork(self) -> None:
        """Fork some workers, or start a program that gets all that children may have, at random moments."""
        for _ in range(self.chance.randint(1, 4)):
            time.sleep(self.chance.uniform(0, _MOMENTS_S / 2))
            match self.chance.randrange(5):
                case 0:
                    self.programs.append(subprocess.Popen(["sleep", "60"], close_fds=False))
                case 1 | 2:
                    self.workers[fork_worker(hooked=False)] = False
                case _:
                    self.workers[fork_worker(hooked=True)] = True

    def save(self, step: int, *, kills: bool = False) -> bool:
        """Save while workers are forked. Return False if the companion was lost."""
        killed = self.manager.health().companion_pid if kills else None
        try:
            self.manager.save_async(step, {"w": torch.full((1000,), step)})
            in_flight = self.manager.in_flight
            self.fork()
            if killed is not None:
                os.kill(killed, signal.SIGKILL)
                assert until(lambda: self.manager.health().companion_pid != killed, _WAIT_S), (
                    "its death is missed"
                )
            if in_flight is not None:
                in_flight.result(_WAIT_S)
        except CompanionLostError:
            return False
        return True

    def check_inherited(self) -> None:
        own = own_files(self.manager)
        held = [
            pid for pid, is_hooked in self.workers.items() if is_hooked and open_files(pid).intersection(own)
        ]
        assert not held, "workers that Python forked hold what is the manager's"
        assert not [each for each in self.programs if open_files(each.pid).intersection(own)]

    def end(self) -> None:
        end_workers(list(self.workers))
        for program in self.programs:
            program.kill()
            program.wait()


def run_round(chance: random.Random, root: str) -> None:
    manager = CheckpointManager(root, 1, chkpt_on_preemption=False)
    storm = Storm(chance, manager)
    try:
        assert storm.save(1), "the first companion was lost, and nobody killed it"
        storm.check_inherited()
        n_lost = 0 if storm.save(2, kills=True) else 1
        assert storm.save(3) or (n_lost == 0 and storm.save(3)), (
            "two companions were lost, and one was killed"
        )
        storm.check_inherited()
        companion = manager.health().companion_pid
        assert companion is not None
        manager.close()
        assert until(lambda: not Path(f"/proc/{companion}").exists(), _WAIT_S), (
            "a companion outlives its manager"
        )
    finally:
        storm.end()


folder, seed, n_rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(n_rounds):
    faulthandler.dump_traceback_later(_ROUND_S, exit=True)
    try:
        run_round(random.Random(f"{seed}-{number}"), f"{folder}/{number}")
    except (AssertionError, TimeoutError) as error:
        print(f"round {number}: {type(error).__name__}: {error}", flush=True)
faulthandler.cancel_dump_traceback_later()
