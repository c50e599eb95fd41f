"""Add to a job's manifest, as a user writes it, what the test cluster lacks: torch in images, TPUs, a real bucket."""

import copy
from typing import Any, Final

__all__ = ["on_test_cluster"]

_TORCH: Final = "/opt/torch"


def on_test_cluster(job: dict[str, Any], *, n_xla_devices: int | None = None) -> dict[str, Any]:
    """Return a copy of the job that runs on the test cluster. Nothing that it says of itself is changed.

    The nodes lend it torch, which its image doesn't have, and the ConfigMap `object-storage` names the emulator. Hosts
    without a TPU are the TPU nodes, one pod on each: the images of trainers are there.

    Args:
        job: The manifest.
        n_xla_devices: The number of CPU devices that torch_xla has in each pod, if the training uses torch_xla.

    """
    adapted = copy.deepcopy(job)
    spec = adapted["spec"]["template"]["spec"]
    (trainer,) = (container for container in spec["containers"] if container["name"] == "trainer")
    torch = {"name": "torch", "hostPath": {"path": _TORCH, "type": "Directory"}}
    spec["volumes"] = [*spec.get("volumes", ()), torch]
    mount = {"name": "torch", "mountPath": _TORCH, "readOnly": True}
    trainer["volumeMounts"] = [*trainer.get("volumeMounts", ()), mount]
    storage = {"configMapRef": {"name": "object-storage", "optional": True}}
    trainer["envFrom"] = [*trainer.get("envFrom", ()), storage]
    if "hosts" in adapted["spec"]["placement"]:
        _put_on_hosts_apart(spec, adapted["metadata"]["name"])
    if n_xla_devices is not None:
        devices = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(n_xla_devices)}
        variables = [{"name": name, "value": value} for name, value in devices.items()]
        trainer["env"] = [*trainer.get("env", ()), *variables]
    return adapted


def _put_on_hosts_apart(spec: dict[str, Any], name: str) -> None:
    spec["nodeSelector"] = {**spec.get("nodeSelector", {}), "cloud.google.com/gke-spot": "true"}
    taints = ("google.com/tpu", "cloud.google.com/gke-spot")
    spec["tolerations"] = [
        *spec.get("tolerations", ()),
        *({"key": taint, "operator": "Exists"} for taint in taints),
    ]
    apart = {
        "labelSelector": {"matchLabels": {"stepkeeper.dev/job-name": name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
