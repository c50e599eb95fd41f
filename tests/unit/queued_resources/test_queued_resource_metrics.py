"""Test the figures of QueuedResources in /metrics, as Prometheus reads them."""

from prometheus_client.parser import text_string_to_metric_families

from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState

OBJECT = (("namespace", "team"), ("queued_resource", "v5e"))
PLACE = (("project", "my-project"), ("zone", "us-central2-b"))
Labels = tuple[tuple[str, str], ...]


def read(world: ResourceWorld) -> dict[str, dict[Labels, float]]:
    """Scrape: metric, labels in order, value."""
    world.metrics.queued_resources.update_list_ages(world.now)
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(world.metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


async def test_state_and_hosts_are_shown_and_go_with_the_object() -> None:
    world = ResourceWorld(node={"count": 2})
    seen = set()
    for _ in range(12):
        await world.run(1)
        states = read(world)["stepkeeper_queued_resource_state"]
        assert list(states.values()) == [1.0], "one series for each object, whatever it was before"
        seen |= {dict(labels)["state"] for labels in states}
    assert {"Pending", "Active"} <= seen
    figures = read(world)
    assert figures["stepkeeper_queued_resource_hosts"] == {OBJECT: 2.0}
    assert figures["stepkeeper_queued_resource_joined_hosts"] == {OBJECT: 2.0}
    assert figures["stepkeeper_queued_resource_recreations"] == {OBJECT: 0.0}
    assert figures["stepkeeper_queued_resource_quota_exhausted"] == {OBJECT: 0.0}
    world.delete()
    await world.run(20)
    await world.reconcile()
    assert world.raw is None
    left = {name: series for name, series in read(world).items() if "queued_resource" in name}
    assert not any(left.values())
    assert "stepkeeper_cloud_tpu_list_age_seconds" not in read(world), "nobody is in the place any more"


async def test_recreations_are_counted_over_a_restart() -> None:
    world = ResourceWorld()
    await world.run(12)
    world.cloud.set_nodes("PREEMPTED")
    await world.run(40)
    world.restart_operator()
    await world.reconcile()
    assert read(world)["stepkeeper_queued_resource_recreations"] == {OBJECT: 1.0}


async def test_lack_of_quota_is_shown() -> None:
    world = ResourceWorld()
    world.cloud.set_quota("v5litepod", 0)
    await world.run(5)
    figures = read(world)
    assert figures["stepkeeper_queued_resource_quota_exhausted"] == {OBJECT: 1.0}
    requests = figures["stepkeeper_cloud_tpu_requests_total"]
    assert requests[("code", "RESOURCE_EXHAUSTED"), ("method", "CreateQueuedResource")] == 1.0


async def test_requests_are_counted_by_method_and_code() -> None:
    world = ResourceWorld()
    world.cloud.inject_error("ListNodes", "UNAVAILABLE", 2, message="down")
    for _ in range(20):  # its creation is looked at before the cloud goes on
        await world.reconcile()
        world.now += 1
    await world.run(12)
    world.delete()
    await world.run(20)
    requests = read(world)["stepkeeper_cloud_tpu_requests_total"]
    by_key = {(dict(labels)["method"], dict(labels)["code"]): value for labels, value in requests.items()}
    assert by_key["ListNodes", "UNAVAILABLE"] == 2.0, "v2 was asked, too"
    assert by_key["ListQueuedResources", "OK"] == world.cloud.count("ListQueuedResources")
    assert by_key["CreateQueuedResource", "OK"] == 1.0
    assert by_key["DeleteQueuedResource", "OK"] == 1.0
    assert by_key["GetQueuedResource", "NOT_FOUND"] >= 1.0
    assert by_key["GetOperation", "OK"] >= 1.0


async def test_the_age_of_the_last_list_grows_while_the_cloud_is_silent() -> None:
    world = ResourceWorld()
    await world.run(12)
    assert world.status.state is QueuedResourceState.ACTIVE
    world.cloud.inject_error("ListNodes", "UNAVAILABLE", None, message="down")
    before = read(world)["stepkeeper_cloud_tpu_list_age_seconds"][PLACE]
    await world.run(10, seconds=30)
    assert read(world)["stepkeeper_cloud_tpu_list_age_seconds"][PLACE] == before + 300
    world.cloud.clear_faults()
    await world.run(4, seconds=30)
    assert read(world)["stepkeeper_cloud_tpu_list_age_seconds"][PLACE] <= 60


async def test_hosts_that_nobody_counts_are_no_number() -> None:
    world = ResourceWorld(hosts_per_node=0)
    await world.run(12)
    figures = read(world)
    assert "stepkeeper_queued_resource_hosts" not in figures
    assert figures["stepkeeper_queued_resource_joined_hosts"] == {OBJECT: 0.0}
