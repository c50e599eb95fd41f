"""Which of this machine's cores threads run on."""

import os
from pathlib import Path

__all__ = ["pin", "tasks"]


def tasks(pid: int | None) -> set[int]:
    """All threads of a process that there are; those to come do as the one that starts them."""
    return {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}


def pin(threads: set[int], core: int) -> None:
    """These threads run on that core only."""
    for thread in threads:
        os.sched_setaffinity(thread, {core})
