"""A pod's containers as the machine sees them: their processes and their memory group."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcluster import cgroups
from stepcluster.errors import FaultError
from stepcluster.machine import run
from stepcluster.parts import Parts
from stepcluster.processes import command_line, namespace_number

HEADROOM_BYTES = 64 << 20
OOM_TIMEOUT_S = 100.0
HOG = """
import os, sys
procs, events, n_before = sys.argv[1:]
held, counts = os.memfd_create("hog"), os.open(events, os.O_RDONLY)
piece = b"x" * os.sysconf("SC_PAGE_SIZE")
with open(procs, "w") as file:
    file.write("0")
while f"oom_kill {n_before}" in os.pread(counts, 4096, 0).decode().splitlines():
    os.write(held, piece)
os.write(1, b"killed")
os._exit(0)
"""
"""Joins a group, takes memory until a process of the group is killed, and says so. None of it is mapped, so the kernel
finds this process small. It takes a page at a time: whatever the killed process held makes room for the page that was
missing. So the kernel has no reason to kill this process as well, unless it kills the group as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One running container of a pod."""

    pod: str
    node: str
    container_id: str
    groups: tuple[Path, ...]

    def processes(self) -> dict[int, str]:
        """Process ids, as the machine sees them, and command lines."""
        pids = set().union(*(cgroups.members(group) for group in self.groups))
        return {pid: command_line(pid) for pid in sorted(pids)}


def find(parts: Parts, pod: str, *, namespace: str = "default", container: str = "") -> Container:
    """Return the running container of that name in the pod, by default its first.

    Raises:
        FaultError: It isn't running.
    """
    text = run([*parts.kubectl, "-n", namespace, "get", "pod", pod, "-o", "json"])
    return locate(parts, json.loads(text), container)


def locate(parts: Parts, pod: Mapping[str, Any], container: str) -> Container:
    """Return the container of a pod that was read from the API server."""
    name = pod["metadata"]["name"]
    statuses: Sequence[Mapping[str, Any]] = pod["status"].get("containerStatuses") or []
    for status in statuses:
        if status["name"] == (container or status["name"]) and "running" in status["state"]:
            container_id = str(status["containerID"]).rpartition("/")[2]
            node = str(pod["spec"]["nodeName"])
            groups = tuple(cgroups.find(parts.layout.cgroup_name(node), container_id))
            return Container(pod=name, node=node, container_id=container_id, groups=groups)
    raise FaultError(
        f"pod {name} has no running container {container or 'at all'}: see `kubectl describe pod {name}`"
    )


def choose(processes: Mapping[int, str], numbers: Mapping[int, int], pattern: str) -> int:
    """Choose the process whose command line has `pattern` in it; without a pattern, the container's first.

    One that has ended since they were listed has the number 0, and isn't chosen.

    Raises:
        FaultError: There is none, or more than one.
    """
    processes = {pid: line for pid, line in processes.items() if numbers[pid]}
    if not pattern and processes:
        return min(processes, key=lambda pid: numbers[pid])
    matching = [pid for pid, line in processes.items() if pattern in line]
    if len(matching) != 1:
        listed = "; ".join(processes.values()) or "none"
        raise FaultError(f"{len(matching)} processes match {pattern!r}, which has to be one of: {listed}")
    return matching[0]


def send(target: Container, number: signal.Signals, *, process: str = "") -> int:
    """Send the signal to one process of the container, and return the process's id.

    Raises:
        FaultError: No process, or more than one, matches; or it has ended meanwhile.
    """
    processes = target.processes()
    if not processes:
        raise FaultError(f"pod {target.pod} has no process left")
    pid = choose(processes, {pid: namespace_number(pid) for pid in processes}, process)
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise FaultError(f"process {pid} of pod {target.pod} has ended meanwhile") from error
    return pid


def exhaust_memory(target: Container) -> None:
    """Make the kernel kill a process of the container for want of memory, then restore the limit.

    Raises:
        FaultError: It didn't.
    """
    group, version = _memory_group(target.groups)
    limit_file = group / version.limit
    limit = limit_file.read_text(encoding="utf-8").strip()
    n_before = _number(group / version.events, "oom_kill")
    held = sum(_number(group / "memory.stat", key) for key in version.held)
    limit_file.write_text(str(held + HEADROOM_BYTES), encoding="utf-8")
    arguments = [str(group / "cgroup.procs"), str(group / version.events), str(n_before)]
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", HOG, *arguments], stdout=subprocess.PIPE) as hog:
        try:
            said, _ = hog.communicate(timeout=OOM_TIMEOUT_S)
            code, n_killed = hog.returncode, _number(group / version.events, "oom_kill") - n_before
            if said == b"killed":
                # Whatever ends it from here on, the container runtime's kill of the whole group among it.
                return
            if code == -signal.SIGKILL and group.exists() and n_killed < 2:
                raise FaultError(f"the kernel killed our own process and none of pod {target.pod}: try again")
            if code != -signal.SIGKILL:
                raise FaultError(
                    f"the process that takes the memory of pod {target.pod} ended with code {code}"
                )
        except subprocess.TimeoutExpired:
            raise FaultError(
                f"no process of pod {target.pod} was killed within {OOM_TIMEOUT_S:g} s"
            ) from None
        finally:
            hog.kill()
            with contextlib.suppress(FileNotFoundError):
                # With the container's last process its group goes too.
                limit_file.write_text(limit, encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """Names of the memory controller's files."""

    limit: str
    events: str
    held: Sequence[str]
    """Memory that can't be taken back from processes without killing them."""


_VERSIONS = (
    _Version(limit="memory.limit_in_bytes", events="memory.oom_control", held=("total_rss", "total_shmem")),
    _Version(limit="memory.max", events="memory.events", held=("anon", "shmem")),
)


def _memory_group(groups: Iterable[Path]) -> tuple[Path, _Version]:
    for group in groups:
        for version in _VERSIONS:
            if (group / version.limit).exists():
                return group, version
    raise FaultError("the container has no memory group: is it running?")


def _number(file: Path, key: str) -> int:
    """Read a value from a file of lines `key value`; 0 if it or the file is missing."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, OSError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
