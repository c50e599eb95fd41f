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

Event = Mapping[str, str]
"""The variables that tpuapi's hooks are given."""


def name_of(event: Event) -> str:
    """Return the host's name. A cloud makes one up; it tells nothing of the node's, whose next life has other names."""
    digest = hashlib.sha256(f"{event['TPU_NODE']}#{event['TPU_NODE_NUMBER']}".encode()).hexdigest()[:8]
    return f"t1v-n-{digest}-w-{event['TPU_WORKER_ID']}"


def attributes_of(event: Event) -> dict[str, str]:
    """Return what the metadata server of the VM answers: the node's own metadata, and what the cloud adds."""
    own = json.loads(Path(event["TPU_METADATA_FILE"]).read_text(encoding="utf-8"))
    tpu_env = {name: event[f"TPU_{name}"] for name in ("ACCELERATOR_TYPE", "NODE_ID", "WORKER_ID", "ZONE")}
    addresses = event["TPU_ADDRESSES"].split(",")
    return {
        **own,
        "accelerator-type": event["TPU_ACCELERATOR_TYPE"],
        "agent-worker-number": event["TPU_WORKER_ID"],
        "instance-id": event["TPU_NODE_ID"],
        "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
        "worker-network-endpoints": ",".join(f"unknown:unknown:{address}" for address in addresses),
    }


def carry_out(parts: Parts, event: Event) -> None:
    """Start the host's machine, tell its processes to end, or take it away."""
    machines, vm, reason = VirtualMachines(parts=parts), name_of(event), event["TPU_REASON"]
    if event["TPU_EVENT"] == "ready":
        _mark(event, event["TPU_WORKER_ID"]).unlink(missing_ok=True)
        attributes = attributes_of(event)
        script = attributes.get("startup-script", "#!/bin/sh\n")
        chips = int(event["TPU_CHIPS_PER_HOST"])
        machines.start(vm, metadata=attributes, startup_script=script, tpu_chips=chips)
        machines.wait_joined(vm)
    elif event["TPU_EVENT"] == "terminating":
        _end_processes(parts, event)
    elif vm in machines.names():
        grace_s = GRACE_S if reason in NOTICED else 0.0
        machines.stop(vm, grace_s=grace_s, delete=reason not in COMES_BACK)


def _end_processes(parts: Parts, event: Event) -> None:
    """Send SIGTERM to what uses the TPU and wait for its end; the last worker tells the service, which waits for it."""
    patience_s = float(event["TPU_DEADLINE_S"] or 0)
    if not patience_s:
        return
    deadline = time.monotonic() + patience_s
    told = list(_tpu_containers(parts, name_of(event)))
    for container in told:
        with contextlib.suppress(FaultError):
            # It has ended meanwhile.
            containers.send(container, signal.SIGTERM)
    while any(container.processes() for container in told):
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)
    _mark(event, event["TPU_WORKER_ID"]).touch()
    if all(_mark(event, str(worker)).exists() for worker in range(int(event["TPU_N_WORKERS"]))):
        body = json.dumps({"node": event["TPU_NODE"]}).encode()
        address = f"http://{event['TPU_ADMIN']}/v1/processes_exited"
        with urllib.request.urlopen(address, data=body, timeout=20):
            say(f"{name_of(event)}: all processes of {event['TPU_NODE']} have exited")


def _mark(event: Event, worker: str) -> Path:
    """Return the file that says that the worker's processes have exited, in the folder of this life of the node."""
    return Path(event["TPU_METADATA_FILE"]).with_name(f"exited-{worker}")


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
    try:
        carry_out(Parts.attach(arguments[0]), os.environ)
    except ClusterError as error:
        say(f"stepcluster: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
