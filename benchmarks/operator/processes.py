"""The operator's process and the other processes of a measurement: their start, memory and processor time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PORT: Final = 18443
HEALTH_PORT: Final = 18080
URL: Final = f"https://127.0.0.1:{PORT}"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process that this one has started."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(arguments: Iterable[str], log: Path, environment: Mapping[str, str] | None = None) -> Started:
    """Start Python with these arguments, and append what it prints to the log."""
    command = [sys.executable, "-m", *arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=output, stderr=output
        )
    return Started(process=process)


class Operator:
    """The operator's process, started again when it ends, as a Deployment does."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        """Start it."""
        self.restarts = 0
        self._kubeconfig = kubeconfig
        self._log = log
        self._ended_cpu_s = 0.0
        self._started = _start_operator(kubeconfig, log)

    @property
    def pid(self) -> int:
        return self._started.pid

    def restart_if_ended(self) -> None:
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.stop()
            self.start()
            self.restarts += 1

    def start(self) -> None:
        self._started = _start_operator(self._kubeconfig, self._log)

    def stop(self) -> None:
        self._ended_cpu_s += read_cpu_s([self.pid])
        self._started.stop()

    def read_cpu_s(self) -> float:
        """Return the processor seconds of all its processes."""
        return self._ended_cpu_s + read_cpu_s([self.pid])


def _start_operator(kubeconfig: Path, log: Path) -> Started:
    """Start the operator as its image does, with the chart's settings."""
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "STEPKEEPER_OPERATOR_KUBECONFIG": str(kubeconfig),
        "STEPKEEPER_OPERATOR_NAMESPACE": "stepkeeper",
        "STEPKEEPER_OPERATOR_ENDPOINT_URL": URL,
        "STEPKEEPER_OPERATOR_ENDPOINT_HOST": "127.0.0.1",
        "STEPKEEPER_OPERATOR_ENDPOINT_PORT": str(PORT),
        "STEPKEEPER_OPERATOR_HEALTH_PORT": str(HEALTH_PORT),
    }
    return start(["stepkeeper_operator"], log, environment)


def read_memory_mb(pid: int) -> tuple[float, float]:
    """Return the resident memory of a process and its peak since `reset_peak`, in MB; zeros if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    values = {name: value for name, _, value in (line.partition(":") for line in lines)}
    now, peak = (int(values.get(name, "0").split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
    return now, peak


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def read_cpu_s(pids: Iterable[int]) -> float:
    """Return the processor seconds that these processes have used."""
    fields = [
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split() for pid in pids
    ]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS


def read_idle_s() -> float:
    """Return the seconds that all cores of the machine together were idle."""
    return int(Path("/proc/stat").read_text(encoding="utf-8").split()[4]) / _TICKS


class CpuClock:
    """Measure the processor seconds that groups of processes use per second."""

    def __init__(self, groups: Mapping[str, Callable[[], float]]) -> None:
        """Take what reads the processor seconds of each group."""
        self._groups = groups
        self._before = self._read()
        self._began = time.monotonic()

    def shares(self) -> dict[str, float]:
        """Return the cores that each group has used since the start, and those that were idle."""
        took_s = time.monotonic() - self._began
        return {name: round((after - self._before[name]) / took_s, 3) for name, after in self._read().items()}

    def _read(self) -> dict[str, float]:
        return {name: read() for name, read in self._groups.items()} | {"idle": read_idle_s()}
