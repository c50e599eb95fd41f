"""Fork workers that only hold what they inherited, as a data loader's do between batches, and look what that is."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepkeeper import CheckpointManager

_LIBC = ctypes.PyDLL(None)
"""Its calls keep the interpreter's lock: a forked worker has no other thread to get it from."""

_PR_SET_PDEATHSIG = 1
_PAUSE_S = 1.0


def fork_worker(*, hooked: bool) -> int:
    """Fork a worker and return its pid.

    Args:
        hooked: False to fork as C code does, of which Python's fork hooks know nothing.

    """
    pid = os.fork() if hooked else int(_LIBC.fork())
    if pid == 0:
        # It is killed as its trainer ends. After a fork in C nobody may ever give the interpreter's lock back.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _LIBC.pause()
        os._exit(0)
    return pid


def end_workers(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


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


def own_files(manager: CheckpointManager) -> set[str]:
    """List what of `open_files` only the manager and its companion should have."""
    companion = manager.health().companion_pid
    assert companion is not None
    ours = {name for name in open_files(os.getpid()) if name.startswith("memfd:")}
    end = manager._parts.companion.ensure_process()._channel._socket.fileno()
    return {*open_files(companion), *ours, Path(f"/proc/self/fd/{end}").readlink().name}


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    ends_s = time.monotonic() + timeout_s
    while not (held := condition()) and time.monotonic() < ends_s:
        time.sleep(0.01)
    return held


class PausedStart:
    """Pause every start of a process until somebody has forked meanwhile, or could not for a second."""

    def __init__(self) -> None:
        self._is_starting, self._is_forked = threading.Event(), threading.Event()
        for module, name in ((subprocess, "_fork_exec"), (os, "posix_spawn")):
            setattr(module, name, self._pause(getattr(module, name)))

    def _pause(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **options: Any) -> Any:
            self._is_starting.set()
            self._is_forked.wait(_PAUSE_S)
            return start(*args, **options)

        return paused

    def fork(self, *, hooked: bool) -> int:
        """Wait until another thread starts a process, and fork right then."""
        assert self._is_starting.wait(60.0)
        pid = fork_worker(hooked=hooked)
        self._is_forked.set()
        return pid
