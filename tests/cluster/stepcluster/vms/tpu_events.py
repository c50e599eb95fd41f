"""Carry out on a cluster what a Cloud TPU API says has happened to a worker of one of its nodes.

Run as `python -m stepcluster.vms.tpu_events CLUSTER`, as the hook of `python -m tpuapi serve`: what has happened is in
the environment, in variables TPU_… .
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcluster import containers
from stepcluster.containers import Container
from stepcluster.errors import ClusterError, FaultError
from stepcluster.machine import run, say
from stepcluster.parts import Parts
from stepcluster.vms.machines import GRACE_S, VirtualMachines

COMES_BACK = ("maintenance",)
"""Reasons for which a machine goes off with its disk kept."""
NOTICED = ("maintenance", "preempted", "suspended", "deleted")
"""Reasons for which a machine is told to shut down, and has a while for it. Else its power is cut."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """Something that has happened to one host."""

    kind: str
    """ready, terminating or gone."""
    reason: str
    node: str
    """Full name of the cloud node."""
    node_id: str
    number: str
    """Of the cloud node's life: the next node of that name has another."""
    worker: int
    n_workers: int
    accelerator_type: str
    chips: int
    zone: str
    addresses: tuple[str, ...]
    metadata: Mapping[str, str]
    deadline_s: float | None
    admin: str
    """Side door of the service, host:port."""
    folder: Path
    """The hook's own for this life of the node, shared by its workers."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "WorkerEvent":
        """Read it from the variables that tpuapi's hooks are given."""
        deadline = environment["TPU_DEADLINE_S"]
        return cls(
            kind=environment["TPU_EVENT"],
            reason=environment["TPU_REASON"],
            node=environment["TPU_NODE"],
            node_id=environment["TPU_NODE_ID"],
            number=environment["TPU_NODE_NUMBER"],
            worker=int(environment["TPU_WORKER_ID"]),
            n_workers=int(environment["TPU_N_WORKERS"]),
            accelerator_type=environment["TPU_ACCELERATOR_TYPE"],
            chips=int(environment["TPU_CHIPS_PER_HOST"]),
            zone=environment["TPU_ZONE"],
            addresses=tuple(environment["TPU_ADDRESSES"].split(",")),
            metadata=json.loads(Path(environment["TPU_METADATA_FILE"]).read_text(encoding="utf-8")),
            deadline_s=float(deadline) if deadline else None,
            admin=environment["TPU_ADMIN"],
            folder=Path(environment["TPU_METADATA_FILE"]).parent,
        )

    @property
    def vm(self) -> str:
        """The host's name. A cloud makes one up; it tells nothing of the node's."""
        digest = hashlib.sha256(f"{self.node}#{self.number}".encode()).hexdigest()[:8]
        return f"t1v-n-{digest}-w-{self.worker}"

    @property
    def attributes(self) -> dict[str, str]:
        """What the metadata server of a Cloud TPU VM answers: the node's own metadata, and what the cloud adds."""
        tpu_env = {
            "ACCELERATOR_TYPE": self.accelerator_type,
            "NODE_ID": self.node_id,
            "WORKER_ID": str(self.worker),
            "ZONE": self.zone,
        }
        return {
            **self.metadata,
            "accelerator-type": self.accelerator_type,
            "agent-worker-number": str(self.worker),
            "instance-id": self.node_id,
            "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
            "worker-network-endpoints": ",".join(f"unknown:unknown:{address}" for address in self.addresses),
        }


def carry_out(parts: Parts, event: WorkerEvent) -> None:
    """Start the host's machine, tell its processes to end, or take it away."""
    machines = VirtualMachines(parts=parts)
    if event.kind == "ready":
        _mark(event).unlink(missing_ok=True)
        machines.start(
            event.vm,
            metadata=event.attributes,
            startup_script=event.metadata.get("startup-script", "#!/bin/sh\n"),
            tpu_chips=event.chips,
        )
        machines.wait_joined(event.vm)
    elif event.kind == "terminating":
        _end_processes(parts, event)
    elif event.vm in machines.names():
        grace_s = GRACE_S if event.reason in NOTICED else 0.0
        machines.stop(event.vm, grace_s=grace_s, delete=event.reason not in COMES_BACK)


def _end_processes(parts: Parts, event: WorkerEvent) -> None:
    """Send SIGTERM to what uses the TPU and wait for its end; the last worker tells the service, which waits for it."""
    if not event.deadline_s:
        return
    told = list(_tpu_containers(parts, event.vm))
    for container in told:
        with contextlib.suppress(FaultError):
            # It has ended meanwhile.
            containers.send(container, signal.SIGTERM)
    deadline = time.monotonic() + event.deadline_s
    while any(container.processes() for container in told):
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)
    if is_last_to_exit(event):
        body = json.dumps({"node": event.node}).encode()
        with urllib.request.urlopen(f"http://{event.admin}/v1/processes_exited", data=body, timeout=20):
            say(f"{event.vm}: all processes of {event.node} have exited")


def is_last_to_exit(event: WorkerEvent) -> bool:
    """Note that the worker's processes have exited; return True if those of all others have too."""
    _mark(event).touch()
    return all(_mark(event, worker).exists() for worker in range(event.n_workers))


def _mark(event: WorkerEvent, worker: int | None = None) -> Path:
    return event.folder / f"exited-{event.worker if worker is None else worker}"


def _tpu_containers(parts: Parts, node: str) -> Iterable[Container]:
    select = ["--all-namespaces", f"--field-selector=spec.nodeName={node},status.phase=Running"]
    pods: list[Mapping[str, Any]] = json.loads(run([*parts.kubectl, "get", "pods", *select, "-o", "json"]))[
        "items"
    ]
    for pod in pods:
        for container in pod["spec"]["containers"]:
            if "google.com/tpu" in (container.get("resources", {}).get("limits") or {}):
                with contextlib.suppress(FaultError):
                    # It has ended meanwhile.
                    yield containers.locate(parts, pod, container["name"])


def main(arguments: list[str]) -> int:
    """Carry out the event in the environment on the cluster of that name."""
    try:
        carry_out(Parts.attach(arguments[0]), WorkerEvent.read(os.environ))
    except ClusterError as error:
        say(f"stepcluster: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
