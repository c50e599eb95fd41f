"""What processes take in memory, as Linux says it."""

from pathlib import Path

__all__ = ["forget_peak", "peak_bytes", "private_bytes", "resident_bytes"]


def forget_peak() -> None:
    """The peak of this process starts anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes() -> int:
    """All that this process has in memory now."""
    return _status("self")["VmRSS"]


def peak_bytes() -> int:
    """The most that it had since `forget_peak`."""
    return _status("self")["VmHWM"]


def private_bytes(pid: int | None) -> int:
    """What is another process's alone, now: shared memory is counted with whoever made it."""
    return 0 if pid is None else _status(str(pid))["RssAnon"]


def _status(process: str) -> dict[str, int]:
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if value.endswith("kB")}
