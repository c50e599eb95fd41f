"""Test that a QueuedResource which is deleted under a running training lets it save, and only then gives machines up.

Both controllers run in one cluster, beside the cloud of tests/tpuapi.
"""

from typing import Any

import pytest

from fake_cluster.job_machines import world_of
from fake_cluster.kubelets import saved_message
from fake_cluster.queued_resources import make_resource
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.cache.keys import job_key, queued_resource_key
from stepkeeper_operator.labels import CLOUD_NODE_LABEL, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.controller import make_queued_resource_controller
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.reconcile import Controller, Reconciler
from stepkeeper_operator.training_jobs.controller import JobController
from tpuapi.cloud import FakeCloud
from tpuapi.nodes import Timings

JOB, MACHINES = job_key("default", "lm"), queued_resource_key("default", "pod-a")
CLOUD_ID = "default-pod-a"


class Both:
    """A job that names a QueuedResource, and the controllers of both."""

    def __init__(self) -> None:
        self.world = world_of(None)
        self.cloud = FakeCloud(lambda: self.world.now, timings=Timings(provisioning_s=40, preempted_s=45))
        self.requests: list[str] = []
        self.cloud.on_request = lambda verb, _id: self.requests.append(verb)
        world = self.world
        shared: dict[str, Any] = {
            "cluster": world.cluster,
            "cache": world.cache,
            "metrics": world.metrics,
            "acting": lambda: True,
            "clock": lambda: world.now,
        }
        jobs = JobController(
            reports=world.reports,
            settings=world.settings,
            ca_pem=lambda: "the CA",
            **shared,
        )
        machines = make_queued_resource_controller(
            cloud=self.cloud, settings=CloudSettings(), identity="operator-1", **shared
        )
        controllers: dict[str, Controller] = {jobs.resource.kind: jobs, machines.resource.kind: machines}
        self.reconciler = Reconciler(controllers=controllers, cache=world.cache, metrics=world.metrics)
        world.cluster.put("namespaces", {"metadata": {"name": "kube-system", "uid": "cluster-uid"}})
        raw = make_resource(finalizers=(), tier={"guaranteed": {}}).to_raw()
        raw["metadata"] = {"name": "pod-a", "namespace": "default", "uid": "uid-a", "generation": 1}
        del raw["status"]
        world.cluster.put("queuedresources", raw)

    async def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for key in (MACHINES, JOB, MACHINES):
                await self.reconciler.reconcile(key)
            self.world.controllers.sync()
            self._join()
            self.world.now += 5

    def _join(self) -> None:
        """Let all hosts join once the machines are there."""
        self.cloud.advance()
        ready = any(node.addresses for node in self.cloud.nodes.values())
        labels = {QUEUED_RESOURCE_UID_LABEL: "uid-a", CLOUD_NODE_LABEL: CLOUD_ID}
        for raw in self.world.cluster.list_objects("nodes"):
            if ready and raw["metadata"].get("labels") != labels:
                self.world.cluster.put("nodes", {**raw, "metadata": raw["metadata"] | {"labels": labels}})

    @property
    def machines(self) -> dict[str, Any] | None:
        return self.world.cluster.objects.get(("queuedresources", "default", "pod-a"))


async def running() -> Both:
    both = Both()
    await both.run(30)
    assert both.world.phase() is Phase.RUNNING
    assert both.requests == ["create"]
    return both


def save(world: World) -> None:
    """Let the trainers save and end."""
    world.controllers.stuck.clear()
    for pod in world.pods:
        message = saved_message(sequence=7, step=120)
        world.controllers.end_pod(pod, ExitCode.SAVED, message=message)


async def test_the_training_saves_before_the_machines_of_a_deleted_resource_go() -> None:
    both = await running()
    world = both.world
    pods = {pod["metadata"]["name"] for pod in world.pods}
    world.controllers.stuck |= {pod["spec"]["nodeName"] for pod in world.pods}  # they take their time to save
    world.cluster.mark_deleted("queuedresources", "default", "pod-a", grace_s=0)
    await both.run(20)
    assert both.requests == ["create"], "nothing is destroyed under a training that saves"
    told = {pod["metadata"]["name"] for pod in world.pods if "deletionTimestamp" in pod["metadata"]}
    assert told == pods, "all trainers are told to save"
    assert all(raw["spec"]["unschedulable"] for raw in world.cluster.list_objects("nodes"))
    save(world)
    await both.run(30)
    assert both.requests == ["create", "delete"]
    assert both.machines is None
    assert not both.cloud.resources
    assert not world.cluster.list_objects("nodes")
    assert world.causes == ["Requested"]
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "QueuedResourceNotFound")


@pytest.mark.parametrize("ends_in", ["TERMINATED", "REPAIRING"])
async def test_a_training_that_autocheckpoint_ends_for_maintenance_goes_on_with_its_machines(
    ends_in: str,
) -> None:
    """It tells the processes and no pod; the machines come back after it, or are made anew."""
    both = await running()
    world = both.world
    assert {pod["spec"]["terminationGracePeriodSeconds"] for pod in world.pods} == {300}
    both.cloud.announce_maintenance(CLOUD_ID, starts_in_s=1, lasts_s=600, ends_in=ends_in)
    await both.run(15)
    assert world.causes == [None]
    save(world)
    await both.run(2)
    assert world.causes[0] == "Maintenance"
    both.cloud.processes_exited(CLOUD_ID)
    await both.run(40)
    assert set(world.causes) <= {"Maintenance", None}
    assert [(c.cause, c.counted_towards_limit) for c in world.status.restarts.by_cause] == [
        ("Maintenance", 0)
    ]
    again = ["delete", "create"] if ends_in == "TERMINATED" else []
    assert both.requests == ["create", *again]
    if ends_in == "REPAIRING":
        assert world.phase() is Phase.RUNNING
