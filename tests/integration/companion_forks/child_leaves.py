"""Fork children during a save that leave the manager's block for their own end: child_leaves.py ROOT-URI.

Prints what became of them, and of the save, as JSON.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
from workers import until

from stepkeeper import CheckpointManager
from stepkeeper.errors import ClosedError

_WAIT_S = 30.0


def choose_an_end(_: CheckpointManager) -> None:
    sys.exit(5)


def fail(_: CheckpointManager) -> None:
    raise ValueError("an error of the child")


def wait(manager: CheckpointManager) -> None:
    try:
        manager.wait()
    except ClosedError:
        sys.exit(6)


def close(manager: CheckpointManager) -> None:
    manager.close()
    sys.exit(7)


def code_of(pid: int) -> int | None:
    """Return the exit code of a child; None if it had to be killed."""
    ended: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if found else [])
        return bool(ended)

    if until(has_ended, _WAIT_S):
        return ended[0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


facts: dict[str, object] = {}
ends: tuple[Callable[[CheckpointManager], None], ...] = (choose_an_end, fail, wait, close)
with CheckpointManager(sys.argv[1], 1) as manager:
    state = {"w": torch.arange(10)}
    manager.save(1, state)
    companion = manager.health().companion_pid
    assert companion is not None
    os.kill(companion, signal.SIGSTOP)
    manager.save_async(2, state)
    time.sleep(0.2)
    for end in ends:
        pid = os.fork()
        if pid == 0:
            end(manager)
        facts[end.__name__] = code_of(pid)
    os.kill(companion, signal.SIGCONT)
    manager.save(3, state)
    facts["steps"] = manager.all_steps()
print(json.dumps(facts))
