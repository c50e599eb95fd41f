"""Measure the memory of processes, as Linux counts it."""

import contextlib
import os
from pathlib import Path
from typing import Final

__all__ = ["Group", "forget_peak", "peak_bytes", "private_bytes", "resident_bytes"]

_MOUNT: Final = Path("/sys/fs/cgroup")


class Group:
    """A control group for this process and those that it starts: what a pod's memory limit is held against.

    It counts the kernel's cache of files that these processes write, too.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._folder = parent / f"bench-{os.getpid()}"
        self._folder.mkdir()
        try:
            known = (self._folder / "memory.peak").exists()
            self._peak = (self._folder / ("memory.peak" if known else "memory.max_usage_in_bytes")).open("r+")
            self._usage = self._folder / ("memory.current" if known else "memory.usage_in_bytes")
            (self._folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        except BaseException:
            self._folder.rmdir()
            raise

    @classmethod
    def entered(cls) -> "Group | None":
        """Put this process in a group of its own; None where it may not make one."""
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                with contextlib.suppress(OSError):
                    return cls(_MOUNT / controllers / path.lstrip("/"))
        return None

    def forget_peak(self) -> int:
        """Restart the peak, and return the memory in use now, in bytes."""
        self._peak.write("0")
        self._peak.flush()
        return int(self._usage.read_text(encoding="ascii"))

    def peak_bytes(self) -> int:
        """Return the most bytes in use since `forget_peak`."""
        self._peak.seek(0)
        return int(self._peak.read())

    def leave(self) -> None:
        """Move this process back, and remove the group unless others are still in it."""
        self._peak.close()
        (self._parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def forget_peak() -> None:
    """Restart the peak of this process."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes() -> int:
    """Return the bytes that this process has in memory now."""
    return _status("self")["VmRSS"]


def peak_bytes() -> int:
    """Return the most bytes that this process had since `forget_peak`."""
    return _status("self")["VmHWM"]


def private_bytes(pid: int | None) -> int:
    """Return the bytes that are another process's alone: shared memory is counted with the process that made it."""
    return 0 if pid is None else _status(str(pid))["RssAnon"]


def _status(process: str) -> dict[str, int]:
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if value.endswith("kB")}
