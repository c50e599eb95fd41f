"""QueuedResources of a test cluster: their manifests, what the operator says of them, and what the cloud has."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stepcluster.api import Cluster
from stepcluster.shelljobs import PATIENCE_S, condition, until, until_status
from stepcluster.vms.tpu_cloud import JOIN_SECRET, PROJECT, TIMINGS, ZONE
from tpuapi.remote import RemoteTpu

PAIR: Final = "pair"
"""The resource whose two slices are real machines, so that all others exist in the API only."""

V5E: Final = "v5litepod"
V5P: Final = "v5p"
V6E: Final = "v6e"

_RESOURCE_LABEL: Final = "stepkeeper.dev/queued-resource"


def queued_resource(name: str, *, slices: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return the manifest of a Spot slice with one host, which is made anew at once.

    Fields are added or replaced; a field of the slices that is None is left out.
    """
    machine = {
        "accelerator": "v5e",
        "topology": "2x2",
        "image": "v2-alpha-tpuv5-lite",
        "startupScriptSecretRef": {"name": JOIN_SECRET},
    }
    body = {
        "project": PROJECT,
        "zone": ZONE,
        "tier": {"spot": {}},
        "recreatePolicy": {"backoff": {"initialSeconds": 0, "maxSeconds": 0}},
        "slices": {key: value for key, value in {**machine, **(slices or {})}.items() if value is not None},
    }
    return {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "QueuedResource",
        "metadata": {"name": name},
        "spec": {**body, **spec},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterObject:
    """One object with a status, in namespace default."""

    cluster: Cluster
    kind: str
    name: str

    def status(self) -> dict[str, Any]:
        found = json.loads(self.cluster.kubectl("get", self.kind, self.name, "-o", "json"))
        return dict(found.get("status") or {})

    def condition(self, kind: str) -> tuple[str, str]:
        found = condition(self.status(), kind)
        return found["status"], found["reason"]

    def message(self, kind: str) -> str:
        return str(condition(self.status(), kind)["message"])

    def events(self) -> list[str]:
        select = f"involvedObject.name={self.name}"
        listed = self.cluster.kubectl("get", "events", "--field-selector", select, "-o", "json")
        return [event["reason"] for event in json.loads(listed)["items"]]

    def until(
        self, is_so: Callable[[dict[str, Any]], Any], *, timeout_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        return until_status(self.status, is_so, timeout_s, seen=lambda: f"of {self.kind} {self.name}")

    def until_state(self, state: str) -> dict[str, Any]:
        """Wait for a state of a QueuedResource, or a phase of a job."""
        return self.until(lambda status: state in {status.get("state"), status.get("phase")})

    def until_condition(self, kind: str, status: str, reason: str = "") -> dict[str, Any]:

        def is_so(found: dict[str, Any]) -> bool:
            seen = condition(found, kind)
            return seen.get("status") == status and reason in {"", seen["reason"]}

        return self.until(is_so)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedResources:
    """All QueuedResources of a cluster beside whose operator a Cloud TPU API of its own runs."""

    cluster: Cluster
    cloud: RemoteTpu

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(items))

    def create(self, name: str, **spec: Any) -> ClusterObject:
        self.apply(queued_resource(name, **spec))
        return self.find(name)

    def find(self, name: str) -> ClusterObject:
        return ClusterObject(cluster=self.cluster, kind="qr", name=name)

    def list_objects(self) -> dict[str, Mapping[str, Any]]:
        listed = json.loads(self.cluster.kubectl("get", "qr", "-o", "json"))["items"]
        return {item["metadata"]["name"]: item for item in listed}

    def set_quota(self, accelerator: str, cores: int | None) -> None:
        """Change the quota. None: there is no limit."""
        self.cloud.do("set_quota", accelerator=accelerator, cores=cores)

    def set_capacity(self, accelerator: str, cores: int | None) -> None:
        """Change what the zone has. None: there is no limit."""
        self.cloud.do("set_capacity", accelerator=accelerator, cores=cores)

    def clean_up(self) -> None:
        """Make the cloud as it was at first, with the pair at most."""
        self.cloud.do("clear_faults")
        self.cloud.do("set_timings", **TIMINGS, accepted_s=0)
        for accelerator in (V5E, V5P, V6E):
            self.set_capacity(accelerator, None)
            self.set_quota(accelerator, None)
        left = self.list_objects().keys() - {PAIR}
        if left:
            # Objects may take a while longer: after an answer that was lost, nobody knows what else is on its way.
            self.cluster.kubectl("delete", "qr", *left, "--wait=false")
            until(lambda: self.in_cloud().keys() <= {f"default-{PAIR}"}, seen=lambda: str(self.in_cloud()))

    def in_cloud(self) -> dict[str, str]:
        """Return the state of everything that the cloud has, by id."""
        found = self.cloud.state()["queued_resources"]
        return {_id(each["name"]): each["state"]["state"] for each in found}

    def cloud_nodes(self) -> list[str]:
        return [_id(node["name"]) for node in self.cloud.state()["nodes"]]

    def list_joined(self, name: str) -> dict[str, Mapping[str, Any]]:
        """Return the cluster's nodes that are hosts of the resource, by name."""
        listed = self.cluster.kubectl("get", "nodes", "-l", f"{_RESOURCE_LABEL}={name}", "-o", "json")
        return {node["metadata"]["name"]: node for node in json.loads(listed)["items"]}

    def delete(self, names: Iterable[str]) -> None:
        options = (f"--timeout={PATIENCE_S:g}s", "--ignore-not-found")
        self.cluster.kubectl("delete", "qr", *names, *options, timeout_s=PATIENCE_S + 10)


def _id(name: str) -> str:
    return name.rpartition("/")[2]
