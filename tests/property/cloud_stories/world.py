"""Run two QueuedResources of one place on the cloud of tests/tpuapi, and check every request of the operator."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from typing_extensions import override

from fake_cluster.queued_resources import PLACE, make_cloud_resource, make_resource
from fake_cluster.resource_world import Killed, ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import MAX_SLICES, QueuedResourceStatus
from stepkeeper_operator.cache.keys import queued_resource_key
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.labels import SLICE_LABEL
from stepkeeper_operator.queued_resources.settings import CloudSettings
from tpuapi.cloud import FakeCloud
from tpuapi.nodes import Timings

__all__ = ["OURS", "StoryWorld"]

OURS: Final = "v5e"
"""The object that the stories happen to."""

NEIGHBOUR: Final = "neighbour"
"""Another object of the same place, which nothing happens to."""

_THEIRS: Final = {"stepkeeper-cluster": "another", "stepkeeper-namespace": "x", "stepkeeper-uid": "y"}
_START: Final = 1_800_000_000.0
_SETTINGS: Final = CloudSettings(poll_fast_s=10, poll_active_s=20, poll_waiting_s=20)

_PLURAL: Final = "queuedresources"
_NEXT: Final = {
    "Deleted",
    "Suspended",
    "Preempted",
    "Failed",
    "QuotaExhausted",
    "Expired",
    "SpecChanged",
    "Vanished",
}


class StoryWorld(ResourceWorld):
    """A cluster with two objects, one operator, and a cloud in which somebody else has machines, too."""

    def __init__(self, *, neighbour: dict[str, Any] | None = None, **spec: Any) -> None:
        self.now = _START
        cloud = FakeCloud(lambda: self.now, timings=Timings(provisioning_s=40, preempted_s=45))
        super().__init__(now=_START, service=cloud, settings=_SETTINGS, **spec)
        self.reasons: set[str] = set()
        """Why machines may be destroyed, as the story has it so far."""

        self.names = [OURS]
        if neighbour is not None:
            self.names.append(NEIGHBOUR)
            raw = make_resource(finalizers=(), **neighbour).to_raw()
            raw["metadata"] = {"name": NEIGHBOUR, "namespace": "team", "uid": "uid-2", "generation": 1}
            del raw["status"]
            self.cluster.put(_PLURAL, raw)
        self._foreign: dict[str, tuple[CloudQueuedResource, CloudNode]] = {}
        self.cloud.on_request = self._check_request

    async def settle_in(self, *, adopted: bool) -> None:
        """Put there what others have; and what is to be adopted, where something is."""
        for cloud_id in ("team-v5e-r1", "somebody-elses"):
            self.make_by_hand(cloud_id, make_resource(), _THEIRS)
            self._foreign[cloud_id] = self._get(cloud_id)
        if adopted:
            self.make_by_hand("team-v5e", self.resource, {})
            self.annotate("team-v5e")

    def make_by_hand(self, cloud_id: str, resource: QueuedResource, labels: dict[str, str]) -> None:
        """Make what a spec asks for as somebody else would, until it is active."""
        made = make_cloud_resource(resource, "ACTIVE", create_time=int(self.now), queueing={})
        n_nodes = len(made.node_ids)
        ids = (cloud_id,) if n_nodes == 1 else tuple(f"{cloud_id}-{index}" for index in range(n_nodes))
        node = {key: value for key, value in made.node.items() if key != "metadata"}
        self.cloud.add(replace(made, id=cloud_id, node_ids=ids, node={**node, "labels": labels}))

    @override
    async def reconcile(self) -> float | None:
        """Reconcile all objects once. A killed operator is started again."""
        for name in self.names:
            try:
                await self.reconciler.reconcile(queued_resource_key("team", name))
            except Killed:
                self.restart_operator()
            except ApiError:
                continue  # the queue would come back to it
        await self._check()
        return None

    @override
    def step(self, seconds: float = 10.0) -> None:
        self.now += seconds
        self.sync_hosts()

    @override
    def sync_hosts(self, nodes: Iterable[CloudNode] | None = None) -> None:
        self.cloud.advance()
        known = self.cloud.nodes.values()
        super().sync_hosts([node for node in known if node.labels.get(UID_LABEL) != _THEIRS[UID_LABEL]])

    def raw_of(self, name: str) -> dict[str, Any] | None:
        """The object; None: it is gone."""
        return self.cluster.objects.get((_PLURAL, "team", name))

    def status_of(self, name: str) -> QueuedResourceStatus:
        return QueuedResource.model_validate(self.raw_of(name)).status

    def condition_of(self, name: str, kind: str) -> tuple[str, str] | None:
        """Return status and reason of a condition."""
        conditions = self.status_of(name).conditions
        return next(((c.status.value, c.reason) for c in conditions if c.type == kind), None)

    def is_up(self, name: str) -> bool:
        return self.condition_of(name, "NodesJoined") == ("True", "AllHostsJoined")

    def names_in_cloud(self, uid: str | None = None) -> list[str]:
        """The ids of the cloud resources that are the object's: by their labels, or by its status."""
        uid = uid or self.uid
        status = self.status if uid == self.uid and self.raw is not None else None
        adopted = status.cloud_name if status is not None and status.operator.adopted else ""
        found = self.cloud.resources.values()
        return [q.id for q in found if q.node.get("labels", {}).get(UID_LABEL) == uid or q.name == adopted]

    @property
    def machines(self) -> list[CloudNode]:
        """The nodes of our object's cloud resources."""
        mine = self.names_in_cloud()
        return [n for n in self.cloud.nodes.values() if _id_of(n.queued_resource) in mine]

    @property
    def lost_hosts(self) -> list[str]:
        """Nodes of the cluster whose machines the cloud doesn't have."""
        there = {node.id for node in self.cloud.nodes.values()}
        nodes = self.cluster.list_objects("nodes")
        return [
            raw["metadata"]["name"] for raw in nodes if raw["metadata"]["labels"][SLICE_LABEL] not in there
        ]

    def _get(self, cloud_id: str) -> tuple[CloudQueuedResource, CloudNode]:
        node = next(n for n in self.cloud.nodes.values() if _id_of(n.queued_resource) == cloud_id)
        return self.cloud.resources[PLACE, cloud_id], node

    def _check_request(self, verb: str, cloud_id: str) -> None:
        """Check a request to create or delete before the cloud gets it."""
        if verb == "label":
            return
        assert cloud_id not in self._foreign, "somebody else's is never touched"
        name = NEIGHBOUR if cloud_id.startswith(f"team-{NEIGHBOUR}") else OURS
        raw = self.raw_of(name)
        assert raw is not None
        assert raw["metadata"].get("finalizers"), "somebody will remove it"
        status = self.status_of(name)
        if verb == "delete":
            reason = status.removing
            stray = not status.cloud_name.endswith(f"/{cloud_id}")
            assert stray or reason in _NEXT, f"destroyed for {reason or 'no reason'}"
            assert reason in {"", "Deleted", *self.reasons}, f"{reason}: nothing of the kind has happened"
            assert reason not in _kept_at(raw["spec"].get("recreatePolicy", {})), (
                f"{reason}: it is to be kept"
            )
            return
        assert status.cloud_name.endswith(f"/{cloud_id}"), "the status names it before it exists"
        mine = set(self.names_in_cloud(raw["metadata"]["uid"]))
        assert mine <= {cloud_id}, "what is left of the earlier one is deleted first"
        nodes = [n for n in self.cloud.nodes.values() if _id_of(n.queued_resource) in mine]
        assert mine or not nodes, "the earlier one's machines are gone"

    async def _check(self) -> None:
        for name in self.names:
            raw = self.raw_of(name)
            if raw is None:
                continue
            assert len(self.names_in_cloud(raw["metadata"]["uid"])) <= 1, "an object never has two"
            if "status" in raw:
                assert len(self.status_of(name).slices) <= MAX_SLICES
        for cloud_id, (resource, node) in self._foreign.items():
            assert self._get(cloud_id) == (resource, node), "somebody else's is never touched"
        await asyncio.sleep(0)


def _kept_at(policy: dict[str, Any]) -> set[str]:
    """Return the ends after which nothing is destroyed."""
    if policy.get("max") == 0:
        return {"Suspended", "Preempted", "Failed"}
    suspended = {"Suspended", "Preempted"} if policy.get("onSuspended") == "Keep" else set()
    return suspended | ({"Failed"} if policy.get("onFailed") == "Keep" else set())


def _id_of(name: str) -> str:
    return name.rpartition("/")[2]
