"""What is to be seen of a QueuedResource: its object in the cluster, which mirrors the cloud."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from demo.kubectl import Kubectl
from demo.watch import Event, Source, watch_json

__all__ = ["MachinesChanged", "UndisturbedStep", "watch_machines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesChanged(Event):
    status: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UndisturbedStep(Event):
    """The run on this machine has done a step."""

    step: int


def watch_machines(name: str) -> Source:
    """Return a source of the changes of a QueuedResource."""

    def source(kubectl: Kubectl) -> Iterator[Event]:
        for status in watch_json(kubectl, "qr", name, "{.status}"):
            yield MachinesChanged(at_s=time.time(), status=status)

    return source
