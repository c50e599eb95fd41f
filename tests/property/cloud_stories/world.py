"""Run a QueuedResource on the cloud of tests/tpuapi, and check every request of the operator."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from typing_extensions import override

from fake_cluster.queued_resources import PLACE, make_cloud_resource, make_resource
from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import MAX_SLICES
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.labels import SLICE_LABEL
from stepkeeper_operator.queued_resources.settings import CloudSettings
from tpuapi.cloud import FakeCloud
from tpuapi.nodes import Timings

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
    """A cluster with an object, one operator, and a cloud in which somebody else has machines, too."""

    def __init__(self, **spec: Any) -> None:
        self.now = _START
        cloud = FakeCloud(lambda: self.now, timings=Timings(provisioning_s=40, preempted_s=45))
        super().__init__(now=_START, service=cloud, settings=_SETTINGS, **spec)
        self.reasons: set[str] = set()
        """Why machines may be destroyed, as the story has it so far."""

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
        """Reconcile once. A killed operator is started again."""
        with contextlib.suppress(ApiError):  # the queue would come back to it
            await super().reconcile()
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

    def names_in_cloud(self) -> list[str]:
        """The ids of the cloud resources that are the object's: by their labels, or by its status."""
        status = None if self.raw is None else self.status
        adopted = status.cloud_name if status is not None and status.operator.adopted else ""
        found = self.cloud.resources.values()
        labelled = set(self.ours)
        return [each.id for each in found if each.id in labelled or each.name == adopted]

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
        raw, status = self.raw, self.status
        assert raw is not None
        assert raw["metadata"].get("finalizers"), "somebody will remove it"
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
        mine = set(self.names_in_cloud())
        assert mine <= {cloud_id}, "what is left of the earlier one is deleted first"
        nodes = [n for n in self.cloud.nodes.values() if _id_of(n.queued_resource) in mine]
        assert mine or not nodes, "the earlier one's machines are gone"

    async def _check(self) -> None:
        if self.raw is not None:
            assert len(self.names_in_cloud()) <= 1, "an object never has two"
            assert len(self.status.slices) <= MAX_SLICES
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
