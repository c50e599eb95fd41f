"""Jobs that Kueue admits, on the machines of a QueuedResource: Kueue alone starts them, and nobody fights over them."""

from typing import Any

from fake_cluster.job_machines import machines, world_of
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

QUEUE = "kueue.x-k8s.io/queue-name"
READY = machines()
ABSENT = machines(active=False, joined=False, state="WaitingForResources")
LOST = machines(active=False, joined=False, state="Suspended", tier={"spot": {}})
PLACE = ("jobsets", "default", "lm")


class Kueue:
    """What Kueue does with a JobSet: suspend it at its creation, resume what it has admitted, whoever suspends that."""

    def __init__(self, world: World, *, quota: bool = True) -> None:
        self.world = world
        self.quota = quota
        self.admitted: set[str] = set()
        """Uids of JobSets. A JobSet that goes takes its admission along."""
        self.starts = 0
        self._seen: set[str] = set()

    def sync(self) -> None:
        jobset = self.world.jobset
        if jobset is None or "deletionTimestamp" in jobset["metadata"]:
            return
        assert jobset["metadata"]["labels"][QUEUE] == "tpus"
        uid = jobset["metadata"]["uid"]
        if uid not in self._seen:  # its webhook
            self._seen.add(uid)
            self._suspend(jobset, suspend=True)
        if self.quota:
            self.admitted.add(uid)
        if uid in self.admitted and jobset["spec"]["suspend"]:
            self.starts += 1
            self._suspend(jobset, suspend=False)

    def _suspend(self, jobset: dict[str, Any], *, suspend: bool) -> None:
        self.world.cluster.put("jobsets", jobset | {"spec": jobset["spec"] | {"suspend": suspend}})


async def run(world: World, kueue: Kueue, resource: dict[str, Any] | None = None) -> None:
    """Let everybody act in turn until nobody has more to do."""
    if resource is not None:
        world.cluster.put("queuedresources", resource)
    for _ in range(15):
        await world.reconcile()
        kueue.sync()
        world.controllers.sync()
        kueue.sync()
        world.now += 2
    await world.reconcile()


def queued_world(resource: dict[str, Any]) -> World:
    world = world_of(resource)
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    metadata = raw["metadata"] | {"labels": {QUEUE: "tpus"}}
    world.cluster.put("checkpointedtrainingjobs", raw | {"metadata": metadata})
    return world


async def test_a_job_joins_the_queue_once_its_machines_are_there_and_kueue_starts_it() -> None:
    world = queued_world(ABSENT)
    kueue = Kueue(world, quota=False)
    await run(world, kueue)
    assert world.jobset is None, "it takes no place in the queue, and no quota, while it couldn't run"
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "WaitingForQueuedResource")
    await run(world, kueue, READY)
    assert world.jobset is not None
    assert world.jobset["spec"]["suspend"], "only Kueue starts it"
    assert world.pods == []
    kueue.quota = True
    await run(world, kueue)
    assert world.phase() is Phase.RUNNING
    assert kueue.starts == 1


async def test_a_loss_of_the_machines_takes_a_job_out_of_the_queue_until_they_are_back() -> None:
    world = queued_world(READY)
    kueue = Kueue(world)
    await run(world, kueue)
    assert world.phase() is Phase.RUNNING
    await run(world, kueue, LOST)
    assert world.jobset is None, "it holds no quota"
    assert world.pods == []
    assert kueue.starts == 1, "nobody resumes what somebody else suspends"
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "QueuedResourceLost")
    assert world.causes == ["SpotPreemption"]
    await run(world, kueue, READY)
    assert world.phase() is Phase.RUNNING
    assert kueue.starts == 2
    assert world.causes == ["SpotPreemption", None]
    assert [entry.counted_towards_limit for entry in world.status.restarts.by_cause] == [0]


async def test_a_job_that_waits_for_quota_leaves_the_queue_when_its_machines_go() -> None:
    world = queued_world(READY)
    kueue = Kueue(world, quota=False)
    await run(world, kueue)
    assert world.jobset is not None
    await run(world, kueue, ABSENT)
    assert world.jobset is None
    assert world.status.attempts == ()
    kueue.quota = True
    await run(world, kueue, READY)
    assert world.phase() is Phase.RUNNING


async def test_hosts_that_left_for_a_moment_cost_no_place_in_the_queue() -> None:
    world = queued_world(READY)
    kueue = Kueue(world, quota=False)
    await run(world, kueue)
    first = world.jobset
    await run(world, kueue, machines(joined=False))
    assert first is not None
    assert world.jobset is not None
    assert world.jobset["metadata"]["uid"] == first["metadata"]["uid"]
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "WaitingForNodes")


async def test_a_start_on_machines_that_are_gone_already_is_no_attempt() -> None:
    world = queued_world(READY)
    kueue = Kueue(world)
    world.controllers.gone |= {"n1", "n2", "n3", "n4"}  # nobody starts its pods
    await run(world, kueue)
    assert world.causes == [None]
    await run(world, kueue, LOST)
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "WaitingForQueuedResource")
    assert world.status.attempts == ()


async def test_a_job_that_its_user_suspends_leaves_the_queue_and_joins_it_again() -> None:
    world = queued_world(READY)
    kueue = Kueue(world)
    await run(world, kueue)
    world.edit(suspend=True)
    await run(world, kueue)
    assert world.jobset is None
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "Requested")
    assert world.causes == ["Requested"]
    assert kueue.starts == 1
    world.edit(suspend=False)
    await run(world, kueue)
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]
