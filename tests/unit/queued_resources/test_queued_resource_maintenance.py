"""Test what is told of announced maintenance: the next one, whatever has begun already, and what is over."""

from dataclasses import replace

import pytest

from fake_cluster.queued_resources import (
    NOW,
    after,
    created,
    decide,
    find,
    make_cloud_resource,
    make_node,
    observe,
)
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.decision import Decision

START = int(NOW)


def window(status: str, start: int | None, end: int | None = None) -> CloudMaintenance:
    return CloudMaintenance(type="SCHEDULED", status=status, window_start=start, window_end=end)


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


@pytest.mark.parametrize("status", ["PENDING", "ONGOING", "UNKNOWN(9)"])
def test_what_has_begun_says_since_when_and_promises_no_save(status: str) -> None:
    resource = created(QueuedResourceState.ACTIVE)
    decision = judge(resource, window(status, START - 600, START + 3000))
    condition = find(decision, "MaintenanceScheduled")
    assert (condition.status, condition.reason) == ("True", "Ongoing" if status == "ONGOING" else "Pending")
    assert f"began at {render_time(START - 600)} and ends at {render_time(START + 3000)}" in condition.message
    assert "save" not in condition.message


@pytest.mark.parametrize("start", [None, START - 600])
def test_a_save_is_promised_only_before_a_window_whose_beginning_is_ahead(start: int | None) -> None:
    resource = created(QueuedResourceState.ACTIVE)
    assert "save" not in find(judge(resource, window("PENDING", start)), "MaintenanceScheduled").message
    ahead = find(judge(resource, window("PENDING", START + 600)), "MaintenanceScheduled").message
    assert "Jobs on it save before it begins" in ahead


def test_a_window_that_is_over_is_no_longer_scheduled_though_it_is_still_listed() -> None:
    resource = created(QueuedResourceState.ACTIVE)
    listed = window("PENDING", START - 7200, START - 3600)
    pending = judge(resource, listed, now=START - 5000)
    assert find(pending, "MaintenanceScheduled").status == "True"
    over = judge(after(resource, pending), listed)
    condition = find(over, "MaintenanceScheduled")
    assert (condition.status, condition.reason) == ("False", "Over")
    times = f"began at {render_time(START - 7200)} and ended at {render_time(START - 3600)}"
    assert times in condition.message
    assert not [event for event in over.events if "maintenance" in event.message.lower()]
    assert not judge(after(resource, over), listed).write_status


def test_maintenance_that_takes_longer_than_its_window_goes_on() -> None:
    decision = judge(created(QueuedResourceState.ACTIVE), window("ONGOING", START - 7200, START - 3600))
    condition = find(decision, "MaintenanceScheduled")
    assert (condition.status, condition.reason) == ("True", "Ongoing")
    times = f"began at {render_time(START - 7200)} and ended at {render_time(START - 3600)}"
    assert condition.message.endswith(f"maintenance is Ongoing, though its window {times}")


@pytest.mark.parametrize(
    ("status", "words"), [("PENDING", ", its window"), ("ONGOING", ", though its window")]
)
def test_a_window_of_which_only_the_end_is_known_says_that_it_has_ended(status: str, words: str) -> None:
    decision = judge(created(QueuedResourceState.ACTIVE), window(status, None, START - 3600))
    message = find(decision, "MaintenanceScheduled").message
    assert message.endswith(f"{status.capitalize()}{words} ended at {render_time(START - 3600)}")


def test_what_is_over_on_one_node_hides_nothing_on_another() -> None:
    resource = created(QueuedResourceState.ACTIVE, node={"count": 2})
    decision = judge(resource, window("PENDING", START - 7200, START - 3600), window("PENDING", START + 900))
    message = find(decision, "MaintenanceScheduled").message
    assert message.startswith("node team-v5e-1: ")
