"""Test the figures of QueuedResources in /metrics, as Prometheus reads them."""

import logging
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_cluster.resource_owners import tell
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.cloud_tpu.naming import CLUSTER_LABEL, NAME_LABEL, UID_LABEL
from stepkeeper_operator.queued_resources.settings import CloudSettings

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
    world = ResourceWorld(slices={"count": 2})
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
    await tell(world, "delete, run 20, look, gone")
    left = {name: series for name, series in read(world).items() if "queued_resource" in name}
    assert not any(left.values())
    assert "stepkeeper_cloud_tpu_list_age_seconds" not in read(world), "no object is in the place any more"


async def test_requests_are_counted_by_method_and_code() -> None:
    world = ResourceWorld()
    world.cloud.inject_error("ListNodes", "UNAVAILABLE", 1, message="down")
    for _ in range(20):  # its creation is looked at before the cloud continues
        await world.reconcile()
        world.now += 1
    await world.run(12)
    await tell(world, "delete, run 20")
    requests = read(world)["stepkeeper_cloud_tpu_requests_total"]
    by_key = {(dict(labels)["method"], dict(labels)["code"]): value for labels, value in requests.items()}
    assert by_key["ListNodes", "UNAVAILABLE"] == 1.0
    assert by_key["ListQueuedResources", "OK"] == world.cloud.count("ListQueuedResources")
    assert by_key["CreateQueuedResource", "OK"] == 1.0
    assert by_key["DeleteQueuedResource", "OK"] == 1.0
    assert by_key["GetQueuedResource", "NOT_FOUND"] >= 1.0
    assert by_key["GetOperation", "OK"] >= 1.0


async def test_recreations_lack_of_quota_and_uncounted_hosts_are_shown_also_by_a_new_operator() -> None:
    world = await active()
    world.cloud.set_quota("v5litepod", 0)
    await tell(world, "preempt, run 40, restart, look")
    figures = read(world)
    assert figures["stepkeeper_queued_resource_recreations"] == {OBJECT: 1.0}
    assert figures["stepkeeper_queued_resource_quota_exhausted"] == {OBJECT: 1.0}
    world = ResourceWorld(hosts_per_node=0)
    await world.run(12)
    assert "stepkeeper_queued_resource_hosts" not in read(world), "it is no number"
    assert read(world)["stepkeeper_queued_resource_joined_hosts"] == {OBJECT: 0.0}


async def test_the_age_of_the_last_list_grows_while_the_cloud_is_silent() -> None:
    world = await active()
    before = read(world)["stepkeeper_cloud_tpu_list_age_seconds"][PLACE]
    await tell(world, "fail ListNodes UNAVAILABLE, run 10 30")
    assert read(world)["stepkeeper_cloud_tpu_list_age_seconds"][PLACE] == before + 300
    await tell(world, "recover, run 4 30")
    assert read(world)["stepkeeper_cloud_tpu_list_age_seconds"][PLACE] <= 60


@pytest.mark.parametrize(
    ("cluster", "watched", "orphans"),
    [
        ("cluster-uid", (), ["team-old"]),
        ("another", (), []),
        ("cluster-uid", ("team",), ["team-old"]),
        ("cluster-uid", ("other",), []),
    ],
)
async def test_what_has_no_object_any_more_in_this_cluster_is_counted_logged_once_and_left_alone(
    cluster: str, watched: tuple[str, ...], orphans: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    world = await active(settings=CloudSettings(poll_active_s=20, watched=watched))
    assert read(world)["stepkeeper_queued_resource_orphans"] == {PLACE: 0}
    (ours,) = world.cloud.resources.values()
    labels = {**ours.node["labels"], CLUSTER_LABEL: cluster, UID_LABEL: "gone", NAME_LABEL: "old"}
    world.cloud.add(replace(ours, id="team-old", node={**ours.node, "labels": labels}))
    world.now += 300
    with caplog.at_level(logging.WARNING):
        await world.run(12, seconds=60)
    assert read(world)["stepkeeper_queued_resource_orphans"] == {PLACE: len(orphans)}
    told = [record for record in caplog.records if "has no QueuedResource" in record.message]
    assert [vars(record)["resource"].rpartition("/")[2] for record in told] == orphans
    assert "team-old" in [each.id for each in world.cloud.resources.values()]
