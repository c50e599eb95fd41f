"""A training that forks a worker as its first save starts the companion: python forking.py ROOT-URI hooked|unhooked.

The worker only holds what it has inherited, as a data loader's does between batches. Unhooked, it is forked as C code
does it, of which Python's fork hooks know nothing.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepkeeper import CheckpointManager

URI, IS_HOOKED = sys.argv[1], sys.argv[2] == "hooked"
LIBC = ctypes.PyDLL(None)
"""Its calls keep the interpreter's lock: a forked worker has no other thread to get it from."""

PR_SET_PDEATHSIG = 1
STATE = {"w": torch.arange(10)}
IS_STARTING, IS_FORKED = threading.Event(), threading.Event()


def paused(start: Callable[..., Any]) -> Callable[..., Any]:
    """Pause a start of a process until a worker was forked meanwhile, or could not be for a second."""

    def start_later(*args: Any, **options: Any) -> Any:
        IS_STARTING.set()
        IS_FORKED.wait(1.0)
        return start(*args, **options)

    return start_later


def fork_worker() -> int:
    assert IS_STARTING.wait(60.0)
    pid = os.fork() if IS_HOOKED else int(LIBC.fork())
    if pid == 0:
        # It is killed as its trainer ends. After a fork in C it may never get the interpreter's lock back.
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        LIBC.pause()
        os._exit(0)
    IS_FORKED.set()
    return pid


def open_files(pid: int) -> set[str]:
    """List the sockets and memory files that a process has open, each by a name that no other has."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = link.readlink()
        except FileNotFoundError:
            continue
        if "socket:" in str(target):
            found.add(target.name)
        elif "memfd:stepkeeper" in str(target):
            found.add(f"memfd:[{link.stat().st_ino}]")
    return found


def own_files(manager: CheckpointManager, companion: int) -> set[str]:
    """List what of `open_files` only the manager and its companion should have."""
    ours = {name for name in open_files(os.getpid()) if name.startswith("memfd:")}
    end = manager._parts.companion.ensure_process()._channel._socket.fileno()
    return {*open_files(companion), *ours, Path(f"/proc/self/fd/{end}").readlink().name}


def check(manager: CheckpointManager, worker: int) -> None:
    assert manager.in_flight is not None
    manager.in_flight.result(60)
    companion = manager.health().companion_pid
    assert companion is not None
    inherited = open_files(worker) & own_files(manager, companion)
    # Without the hooks the worker is to hold the socket: else nothing is shown by what follows.
    assert bool(inherited) != IS_HOOKED, inherited
    if IS_HOOKED:
        # The memory of snapshots would be kept for as long as the worker lives.
        assert "stepkeeper-snapshot" not in Path(f"/proc/{worker}/maps").read_text()
    os.kill(companion, signal.SIGKILL)
    killed_s = time.monotonic()
    while manager.health().companion_pid is not None:
        assert time.monotonic() - killed_s < 15, "a companion that has died is missed at once"
        time.sleep(0.01)
    manager.save(2, STATE).result()
    assert manager.health().committed_step == 2


subprocess._fork_exec = paused(subprocess._fork_exec)  # type: ignore[attr-defined]  # nothing else is before all starts
os.posix_spawn = paused(os.posix_spawn)
with CheckpointManager(URI, save=1) as training:
    training.save(1, STATE)
    forked = fork_worker()
    try:
        check(training, forked)
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
