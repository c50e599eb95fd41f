"""In trainers and companions alike: what a process asks of its store is counted, and one of them is killed there.

Nothing of the shipped code knows of this. A trainer arms itself; a companion is an interpreter of its own, which finds
`in_companion/sitecustomize.py` on its path.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any, Final, Self

from stepkeeper.storage.posix import PosixStore

_OPERATIONS: Final = tuple(
    name
    for name, value in vars(PosixStore).items()
    if callable(value) and not name.startswith("_") and name != "close"
)
"""All that a store can be asked for."""

_ORDER: Final = "STEPKEEPER_TEST_KILLS"
_DEATH_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The `victim` is killed when `process` comes to its operation `number`."""

    process: str
    """As the victim: `trainer 0`, `companion 1`."""

    number: int
    """From 0."""

    moment: str
    """before or after."""

    victim: str

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        raw = json.loads(text)
        return None if raw is None else cls(**raw)


def arm(rank: int, folder: Path, fault: Fault | None) -> None:
    """This trainer notes its operations in `folder`, and so will its companions; `fault` comes true, once."""
    order = [rank, str(folder), None if fault is None else asdict(fault)]
    os.environ[_ORDER] = json.dumps(order)
    above = str(Path(__file__).parent / "in_companion"), str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([*above, os.environ.get("PYTHONPATH", "")])
    _arm(f"trainer {rank}", folder, fault)


def arm_companion() -> None:
    """The same for a companion, by what its trainer has left in the environment."""
    rank, folder, fault = json.loads(os.environ[_ORDER])
    _arm(f"companion {rank}", Path(folder), Fault.from_json(json.dumps(fault)))


def n_operations(folder: Path, process: str) -> int:
    """Return how many operations the process has come to, those of one that took its place included."""
    try:
        return len((folder / f"{process} did").read_text().splitlines())
    except FileNotFoundError:
        return 0


def was_killed(folder: Path) -> bool:
    """The fault has come true."""
    return (folder / "killed").exists()


def _arm(name: str, folder: Path, fault: Fault | None) -> None:
    pid_file = folder / f"{name} is"
    pid_file.with_suffix(".new").write_text(str(os.getpid()))
    pid_file.with_suffix(".new").rename(pid_file)
    if _taken(folder, name):
        os.kill(os.getpid(), signal.SIGKILL)
    counted = _Counted(name, folder, fault)
    for operation in _OPERATIONS:
        setattr(PosixStore, operation, counted.around(operation, getattr(PosixStore, operation)))


class _Counted:
    def __init__(self, name: str, folder: Path, fault: Fault | None) -> None:
        # A companion that took a killed one's place comes to the same operation again.
        mine = fault is not None and fault.process == name and not was_killed(folder)
        self._fault = fault if mine else None
        self._folder = folder
        self._did = (folder / f"{name} did").open("a", buffering=1)
        self._n = 0
        self._lock = Lock()

    def around(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(store: PosixStore, path: str, *arguments: Any, **options: Any) -> Any:
            with self._lock:
                number, self._n = self._n, self._n + 1
                self._did.write(f"{operation} {path}\n")
            self._kill_at(number, "before")
            try:
                return call(store, path, *arguments, **options)
            finally:
                # Also after one that says that there is no such object.
                self._kill_at(number, "after")

        return counted

    def _kill_at(self, number: int, moment: str) -> None:
        fault = self._fault
        if fault is None or (number, moment) != (fault.number, fault.moment):
            return
        (self._folder / "killed").touch()
        doom = self._folder / f"{fault.victim} is doomed"
        doom.touch()
        pid_file = self._folder / f"{fault.victim} is"
        # Who isn't there yet dies when it comes: one of both takes the order away.
        if pid_file.exists() and _taken(self._folder, fault.victim):
            pid = int(pid_file.read_text())
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _await_death(pid)


def _taken(folder: Path, name: str) -> bool:
    try:
        (folder / f"{name} is doomed").unlink()
    except FileNotFoundError:
        return False
    return True


def _await_death(pid: int) -> None:
    """Wait for the kill, so that what comes after it comes after it."""
    deadline = time.monotonic() + _DEATH_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        time.sleep(0.0005)
