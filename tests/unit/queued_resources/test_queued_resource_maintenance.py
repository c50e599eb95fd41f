"""Test which of several announced maintenances is told: the next one, whatever has begun already."""

from dataclasses import replace

import pytest

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance
from stepkeeper_operator.queued_resources.decision import Decision
from stepkeeper_operator.testing.queued_resources import (
    NOW,
    after,
    created,
    decide,
    find,
    make_cloud_resource,
    make_node,
    observe,
)

START = int(NOW)


def window(status: str, start: int | None) -> CloudMaintenance:
    return CloudMaintenance(type="SCHEDULED", status=status, window_start=start)


def judge(resource: QueuedResource, *windows: CloudMaintenance | None, now: float = NOW) -> Decision:
    cloud = make_cloud_resource(resource, "ACTIVE")
    nodes = [replace(make_node(cloud, index), maintenance=item) for index, item in enumerate(windows)]
    return decide(resource, observe(cloud, nodes=nodes), now=now)


@pytest.mark.parametrize(
    ("windows", "next_start", "named"),
    [
        ((window("ONGOING", START - 600), window("PENDING", START + 900)), START + 900, "team-v5e-1"),
        ((window("PENDING", START - 60), window("PENDING", START + 900)), START + 900, "team-v5e-1"),
        ((window("PENDING", None), window("PENDING", START + 900)), START + 900, "team-v5e-1"),
        ((window("PENDING", START + 90), window("PENDING", START + 60)), START + 60, "team-v5e-1"),
        ((None, window("ONGOING", START - 600)), START - 600, "team-v5e-1"),
        ((window("ONGOING", START - 900), window("ONGOING", START - 600)), START - 600, "team-v5e-1"),
        ((None, window("PENDING", None)), None, "team-v5e-1"),
    ],
)
def test_the_next_window_is_told_whatever_else_is_announced(
    windows: tuple[CloudMaintenance | None, ...], next_start: int | None, named: str
) -> None:
    resource = created(QueuedResourceState.ACTIVE, node={"count": 2})
    decision = judge(resource, *windows)
    assert decision.status.next_maintenance_time == next_start
    message = find(decision, "MaintenanceScheduled").message
    assert message.startswith(f"node {named}")
    both_announced = all(item is not None for item in windows)
    assert ("1 more" in message) is both_announced


def test_what_is_ongoing_is_told_beside_the_next_window() -> None:
    resource = created(QueuedResourceState.ACTIVE, node={"count": 2})
    decision = judge(resource, window("ONGOING", START - 600), window("PENDING", START + 900))
    condition = find(decision, "MaintenanceScheduled")
    assert (condition.status, condition.reason) == ("True", "Ongoing")
    assert "team-v5e-0 has maintenance now" in condition.message


def test_each_window_is_told_by_an_event_of_its_own() -> None:
    resource = created(QueuedResourceState.ACTIVE, node={"count": 2})
    first = judge(resource, window("ONGOING", START - 600), None)
    assert [event.reason for event in first.events if "maintenance" in event.message.lower()] == ["Ongoing"]
    resource = after(resource, first)
    second = judge(resource, window("ONGOING", START - 600), window("PENDING", START + 900))
    assert len([event for event in second.events if "team-v5e-1" in event.message]) == 1
    again = judge(after(resource, second), window("ONGOING", START - 600), window("PENDING", START + 900))
    assert (again.events, again.write_status) == ((), False)
