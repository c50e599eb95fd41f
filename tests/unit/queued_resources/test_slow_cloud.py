"""Test that requests which hang hold up their own object, and no other."""

import asyncio
from typing import Any

from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from fake_cluster.queued_resources import CLUSTER_ID, make_resource
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey, queued_resource_key
from stepkeeper_operator.cloud_tpu.cloud import (
    CloudRequest,
)
from stepkeeper_operator.cluster import QUEUED_RESOURCES
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.queued_resources.controller import make_queued_resource_controller
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.reconcile import Reconciler
from stepkeeper_operator.work_queue import KindQueues
from tpuapi.cloud import FakeCloud

N_HUNG = 40


class HangingCloud(FakeCloud):
    """A cloud that never answers some creations."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.hung: list[str] = []
        self.all_hang, self.answered = asyncio.Event(), asyncio.Event()

    @override
    async def create_queued_resource(self, request: CloudRequest) -> str:
        if request.id.startswith("team-hung"):
            self.hung.append(request.id)
            if len(self.hung) == N_HUNG:
                self.all_hang.set()
            await asyncio.Event().wait()
        operation = await super().create_queued_resource(request)
        self.answered.set()
        return operation


def raw_of(name: str) -> dict[str, Any]:
    raw = make_resource(finalizers=()).to_raw()
    raw["metadata"] = {"name": name, "namespace": "team", "uid": f"uid-{name}", "generation": 1}
    del raw["status"]
    return raw


async def test_many_creations_that_hang_hold_up_no_other_one() -> None:
    cloud, cluster, cache, metrics = HangingCloud(), FakeCluster(lambda: 0.0), Cache(), Metrics()
    settings = CloudSettings()
    controller = make_queued_resource_controller(
        cluster=cluster,
        cache=cache,
        cloud=cloud,
        settings=settings,
        metrics=metrics,
        identity="operator-1",
        acting=lambda: True,
    )
    kind = controller.resource.kind
    queues: KindQueues[ObjectKey] = KindQueues({kind: settings.n_at_once})
    cluster.put("namespaces", {"metadata": {"name": "kube-system", "uid": CLUSTER_ID}})

    def record(plural: str, raw: RawObject, deleted: bool) -> None:  # a plain callable
        if plural == "queuedresources":
            cache.record(QUEUED_RESOURCES, raw, deleted=deleted)
            queues.add(queued_resource_key("team", raw["metadata"]["name"]))

    cluster.on_change = record
    for number in range(N_HUNG):
        cluster.put("queuedresources", raw_of(f"hung-{number}"))
    reconciler = Reconciler(controllers={kind: controller}, cache=cache, metrics=metrics)
    running = asyncio.create_task(queues.run(reconciler.reconcile))
    await cloud.all_hang.wait()
    cluster.put("queuedresources", raw_of("good"))
    await cloud.answered.wait()
    assert cloud.created == ["team-good"]
    assert len(cloud.hung) == N_HUNG
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
