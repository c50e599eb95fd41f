"""What a user's job is given to run on a test cluster, which has no TPUs, no bucket and no torch in its images."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from stepcluster.gcs import BUCKET
from stepcluster.nodes import TPU_TAINTS

_TORCH: Final = "torch"
_ON_CPU: Final = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
"""The nodes call themselves TPU hosts; XLA runs on four CPU devices."""


def for_test_cluster(
    job: Mapping[str, Any], *, nodes: Sequence[str] = (), torch_xla: bool = True
) -> dict[str, Any]:
    """Return the job with what it needs here: the cluster's bucket and its address, torch from the nodes.

    The address is in ConfigMap `object-storage` of the job's namespace. The image is on the nodes, under its own name.
    A job that asks for no TPUs may run on `nodes`, one pod on each: TPU nodes have its image. Without `torch_xla` it
    gets no devices of that.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(job))
    spec = changed["spec"]
    folder = urlsplit(spec["checkpoint"]["uri"]).path
    spec["checkpoint"]["uri"] = f"gs://{BUCKET}{folder}"
    pod = spec["template"]["spec"]
    (trainer,) = (each for each in pod["containers"] if each["name"] == "trainer")
    if torch_xla:
        more = [{"name": name, "value": value} for name, value in _ON_CPU.items()]
        trainer["env"] = [*trainer.get("env", ()), *more]
    storage = {"configMapRef": {"name": "object-storage", "optional": True}}
    trainer["envFrom"] = [*trainer.get("envFrom", ()), storage]
    mount = {"name": _TORCH, "mountPath": "/opt/torch", "readOnly": True}
    trainer["volumeMounts"] = [*trainer.get("volumeMounts", ()), mount]
    volume = {"name": _TORCH, "hostPath": {"path": "/opt/torch", "type": "Directory"}}
    pod["volumes"] = [*pod.get("volumes", ()), volume]
    if nodes:
        # Those of TPU nodes only: on a node that shuts down no pod could start.
        pod["tolerations"] = [
            {"key": taint["key"], "operator": "Exists", "effect": taint["effect"]} for taint in TPU_TAINTS
        ]
        pod["affinity"] = _one_on_each(nodes, changed["metadata"]["name"])
    return changed


def _one_on_each(nodes: Sequence[str], job: str) -> dict[str, Any]:
    """Keep the job's pods on these nodes, and apart from each other."""
    name = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}
    own = {"matchLabels": {"stepkeeper.dev/job-name": job}}
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [name]}]
            }
        },
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": own, "topologyKey": "kubernetes.io/hostname"}
            ]
        },
    }
