"""Test the cache: the jobs that a change concerns, and objects that are gone unnoticed."""

from fake_cluster.world import World, running
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.cache.keys import job_key
from stepkeeper_operator.facts.raw import RawObject

KEY = job_key("default", "lm")


def silently(world: World, plural: str, namespace: str | None, name: str) -> RawObject:
    """Delete the object while the watch is broken."""
    return world.cluster.objects.pop((plural, namespace, name))


async def test_a_node_that_is_gone_unnoticed_is_remembered_as_lost() -> None:
    world = await running()
    name = world.pods[0]["spec"]["nodeName"]
    silently(world, "nodes", None, name)
    assert await world.sweep() == {KEY}
    node = world.cache.get_node(name)
    assert node is not None
    assert node.lost
    assert await world.sweep() == frozenset()


async def test_what_a_watch_brings_late_does_not_undo_what_a_write_was_answered_with() -> None:
    world = await running()
    old = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.edit(totalSteps=5)
    assert world.cache.record_training_job(old) == ()
    raw = world.cache.get_training_job(KEY)
    assert raw is not None
    assert raw["spec"]["totalSteps"] == 5


async def test_a_lost_node_concerns_the_jobs_that_have_pods_on_it() -> None:
    world = await running()
    on, off = world.pods[0]["spec"]["nodeName"], "n4"
    for name, concerned in ((on, (KEY,)), (off, ())):
        node = world.cluster.objects["nodes", None, name]
        assert world.cache.record_node(node) == (), "a heartbeat"
        not_ready = node["status"]["conditions"][0] | {"status": "False"}
        assert world.cache.record_node(node | {"status": {"conditions": [not_ready]}}) == ()
        assert world.cache.record_node(node, deleted=True) == concerned


async def test_a_jobset_that_is_gone_unnoticed_holds_a_job_up_for_seconds_only() -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1)
    await world.reconcile()
    for plural, name in [
        ("jobsets", "lm"),
        ("jobs", "lm-w-0"),
        *(("pods", p["metadata"]["name"]) for p in world.pods),
    ]:
        silently(world, plural, "default", name)
    world.now += 5
    again_s = await world.reconcile()
    assert again_s is not None
    assert again_s <= 5
    await world.sweep()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert len(world.pods) == 2


async def test_objects_that_are_gone_unnoticed_are_found() -> None:
    world = await running()
    assert await world.sweep() == frozenset()
    assert len(world.cache.list_pods(world.job.metadata.uid)) == 2
    silently(world, "jobsets", "default", "lm")
    silently(world, "jobs", "default", "lm-w-0")
    pod = silently(world, "pods", "default", world.pods[0]["metadata"]["name"])
    assert await world.sweep() == {KEY}
    assert world.cache.get_jobset(KEY) is None
    assert world.cache.get_batch_job("jobs-1") is None
    assert world.cache.get_pod("default", pod["metadata"]["name"]) is None
    silently(world, "checkpointedtrainingjobs", "default", "lm")
    assert await world.sweep() == {KEY}
    assert world.cache.get_training_job(KEY) is None
