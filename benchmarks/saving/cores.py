"""Pin threads to cores of this machine, and measure the CPU time that processes took."""

import os
from pathlib import Path

__all__ = ["cpu_s_of", "pin", "tasks"]


def tasks(pid: int | None) -> set[int]:
    """Return the ids of all threads of a process; a later thread inherits its core from the one that starts it."""
    return {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}


def pin(threads: set[int], core: int) -> None:
    """Pin these threads to that core."""
    for thread in threads:
        os.sched_setaffinity(thread, {core})


def cpu_s_of(pid: int | None) -> float:
    """Return the CPU seconds that another process, with all its threads, has taken. proc(5): utime and stime."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
