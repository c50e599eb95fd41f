"""A pod's containers as the machine sees them: their processes."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcluster import cgroups
from stepcluster.errors import FaultError
from stepcluster.parts import Parts
from stepcluster.processes import namespace_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    pod: str
    groups: tuple[Path, ...]

    def processes(self) -> set[int]:
        """Process ids, as the machine sees them."""
        return set().union(*(cgroups.members(group) for group in self.groups))


def locate(parts: Parts, pod: Mapping[str, Any], container: str) -> Container:
    """Return the container of a pod that was read from the API server."""
    name = pod["metadata"]["name"]
    statuses: Sequence[Mapping[str, Any]] = pod["status"].get("containerStatuses") or []
    for status in statuses:
        if status["name"] == (container or status["name"]) and "running" in status["state"]:
            container_id = str(status["containerID"]).rpartition("/")[2]
            node = str(pod["spec"]["nodeName"])
            groups = tuple(cgroups.find(parts.layout.cgroup_name(node), container_id))
            return Container(pod=name, groups=groups)
    raise FaultError(
        f"pod {name} has no running container {container or 'at all'}: see `kubectl describe pod {name}`"
    )


def send(target: Container, number: signal.Signals) -> None:
    """Send the signal to the container's first process.

    Raises:
        FaultError: It has ended meanwhile.
    """
    numbers = {pid: namespace_number(pid) for pid in target.processes()}
    # One that has ended since they were listed has the number 0.
    running = [pid for pid, number in numbers.items() if number]
    if not running:
        raise FaultError(f"pod {target.pod} has no process left")
    pid = min(running, key=lambda pid: numbers[pid])
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise FaultError(f"process {pid} of pod {target.pod} has ended meanwhile") from error
