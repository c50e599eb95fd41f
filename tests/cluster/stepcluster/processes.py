"""The cluster's processes: one tree in namespaces of its own, so that its first process takes all others with it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepcluster import reaper
from stepcluster.machine import search_path, wait_until

CLUSTER_MARK = "STEPKEEPER_CLUSTER"
"""In the environment of each process of a cluster: its folder. So all are found even if nothing was written down."""
NODE_MARK = "STEPKEEPER_NODE"
"""In the environment of each process of a node, containers apart: the node's folder."""
PROGRAM_MARK = "STEPKEEPER_PROGRAM"
"""In the environment of each program that was started inside a cluster: its name."""

_END_S = 60.0
"""Seconds that a killed process may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespaces:
    """The network, process and mount namespaces of a cluster or a node, held by their first process."""

    pid: int

    def enter(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--", *argv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Starts programs inside a cluster, each with a log of its own."""

    namespaces: Namespaces
    folder: Path
    """The cluster's."""

    def start(self, name: str, argv: Sequence[str], *, marks: Mapping[str, str] | None = None) -> Path:
        """Start the program and return its log's path."""
        log = self.folder / "logs" / f"{name}.log"
        own = {CLUSTER_MARK: str(self.folder), PROGRAM_MARK: name, **(marks or {})}
        start_detached(self.namespaces.enter(argv), log, own)
        return log

    def kill(self, name: str) -> None:
        """Kill the program of this name, and wait until it has ended and its ports are free."""
        kill_marked(PROGRAM_MARK, name, within=str(self.folder), wait_s=_END_S)
        wait_until(
            lambda: not any(marked(PROGRAM_MARK, name, within=str(self.folder))),
            f"the end of {name}",
            timeout_s=_END_S,
        )


def start_namespaces(folder: Path, log: Path) -> Namespaces:
    """Make new namespaces. Everything started in them ends when their first process does."""
    argv = ["unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "--propagation", "private"]
    start_detached([*argv, sys.executable, "-I", "-S", reaper.__file__], log, {CLUSTER_MARK: str(folder)})
    wait_until(
        lambda: first_process(CLUSTER_MARK, str(folder)) is not None,
        "the namespaces",
        timeout_s=60,
        log=log,
        poll_s=0.02,
    )
    pid = first_process(CLUSTER_MARK, str(folder))
    assert pid is not None
    return Namespaces(pid=pid)


def start_detached(argv: Sequence[str], log: Path, marks: Mapping[str, str]) -> None:
    """Start the program in a session of its own: Ctrl-C in this terminal doesn't reach it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # What the caller has in its environment for its own sake must not change how the cluster behaves.
    environment = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env={"PATH": search_path(), **environment, **marks},
        )
    # Nobody waits for it here: it outlives this process. Without this, Popen warns of that when it is dropped.
    process.returncode = 0


def first_process(mark: str, value: str) -> int | None:
    """Find the process with number 1 inside its own namespace, directly below a marked launcher."""
    for pid in marked(mark, value):
        numbers = _status(pid).get("NSpid", "").split()
        if (
            len(numbers) == (3 if mark == NODE_MARK else 2)
            and numbers[-1] == "1"
            and _status(pid).get("Name") != "unshare"
        ):
            return pid
    return None


def marked(mark: str, value: str, *, within: str = "") -> Iterator[int]:
    """Process ids, as the machine sees them, of all processes with this mark, of one cluster if `within` names it."""
    for path in Path("/proc").iterdir():
        if (
            path.name.isdigit()
            and int(path.name) != os.getpid()
            and _is_marked(int(path.name), mark, value, within)
        ):
            yield int(path.name)


def kill_marked(mark: str, value: str, *, within: str = "", wait_s: float = 0.0) -> None:
    """Send SIGKILL to every marked process, and wait up to `wait_s` for their end.

    A dying process loses its environment, and so its mark, before it closes its sockets: only the handle says the end.
    """
    killed: list[int] = []
    with contextlib.ExitStack() as handles:
        for pid in marked(mark, value, within=within):
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                handles.callback(os.close, handle)
                # The number may have gone to another process since it was listed; the handle can't.
                if _is_marked(pid, mark, value, within):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed.append(handle)
        deadline = time.monotonic() + wait_s
        for handle in killed:
            select.select([handle], [], [], max(0.0, deadline - time.monotonic()))


def _is_marked(pid: int, mark: str, value: str, within: str) -> bool:
    wanted = {f"{mark}={value}".encode()}
    if within:
        wanted.add(f"{CLUSTER_MARK}={within}".encode())
    return wanted <= _environment(pid)


def namespace_number(pid: int) -> int:
    """Return the process's number in the innermost namespace that it is in; 0 if it has ended."""
    return int((_status(pid).get("NSpid") or "0").split()[-1])


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
