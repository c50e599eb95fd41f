"""Test the conditions of an active QueuedResource: joining, autocheckpoint, health, maintenance."""

from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    NOW,
    after,
    check,
    created,
    decide,
    find,
    make_cloud_resource,
    make_member,
    make_node,
    noted,
    observe,
)
from fake_cluster.stories import table
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import MAX_SLICES, QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance, CloudNode, CloudTPUError, ErrorKind
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.queued_resource import read_queued_machines
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.queued_resources.decision import Decision
from stepkeeper_operator.queued_resources.observed import Observed

TWO: dict[str, Any] = {"slices": {"count": 2}}


def active(*, active_s: int = 0, **spec: Any) -> QueuedResource:
    since = int(NOW) - active_s
    return noted(created(QueuedResourceState.ACTIVE, **spec), active_since=since, missing_hosts_since=since)


def slices(resource: QueuedResource, **changes: Any) -> list[CloudNode]:
    cloud = make_cloud_resource(resource, "ACTIVE")
    return [make_node(cloud, index, **changes) for index in range(len(cloud.node_ids))]


def judge(
    resource: QueuedResource, *members: Node, nodes: list[CloudNode] | None = None, now: float = NOW
) -> Decision:
    """Decide about an active one, with nodes as in its spec, or with these."""
    shown = slices(resource) if nodes is None else nodes
    cloud = make_cloud_resource(resource, "ACTIVE")
    return decide(resource, observe(cloud, nodes=shown, members=members), now=now)


def member(index: int, **changes: Any) -> Node:
    """Make a host of one of several slices."""
    made = make_member(f"host-{index}", f"n{index}", slice_id=f"team-v5e-{index}")
    return replace(made, **changes)


HOST = member(0, slice_id="team-v5e", addresses=("10.0.0.0",))
SILENT = replace(HOST, ready=False)
CORDONED = replace(HOST, unschedulable=True)


def reason(decision: Decision, kind: str = "NodesJoined") -> str:
    return find(decision, kind).reason


def test_fields_that_are_not_known_are_named_and_change_nothing_else() -> None:
    decision = judge(active(slices={"futureDisk": 1}, futureBudget={}))
    check(
        decision, "Degraded", "True/UnknownFields", "doesn't know spec.futureBudget, spec.slices.futureDisk"
    )
    assert decision.actions == judge(active()).actions


BY_ADDRESS = replace(HOST, slice_id="")
LATE_S = 900
UNCOUNTED: dict[str, Any] = {"n_hosts": 0, "addresses": ()}
TWO_HOSTS: dict[str, Any] = {"n_hosts": 2, "addresses": ("10.0.0.0", "10.0.0.1")}


@table(
    "members, shown, after_s, found, words",
    {
        "two slices": ((member(0), member(1)), {}, 0, "2/2 True/AllHostsJoined", ""),
        "one": ((HOST,), {}, 0, "1/1 True/AllHostsJoined", ""),
        "one known by its address": ((BY_ADDRESS,), {}, 0, "1/1 True/AllHostsJoined", ""),
        "of an unknown number none": ((), UNCOUNTED, 0, "0/? Unknown/HostsUnknown", "team-v5e"),
        "of an unknown number one": ((HOST,), UNCOUNTED, 0, "1/? Unknown/HostsUnknown", "team-v5e"),
        "late, of an unknown number": (
            (),
            UNCOUNTED,
            LATE_S,
            "0/? False/JoinTimeout",
            "report its number of hosts",
        ),
        "a cordoned one": ((CORDONED,), {}, 5000, "0/1 False/Cordoned", "kubectl uncordon host-0"),
        "a cordoned one beside none": (
            (CORDONED,),
            TWO_HOSTS,
            5000,
            "0/2 False/JoinTimeout",
            "kubectl uncordon",
        ),
        "a silent one beside none": ((SILENT,), TWO_HOSTS, 5000, "0/2 False/JoinTimeout", "host-0 not Ready"),
    },
)
def test_hosts_have_joined_or_are_missed(
    members: tuple[Node, ...], shown: dict[str, Any], after_s: int, found: str, words: str
) -> None:
    resource = active(**(TWO if len(members) == 2 else {}))
    decision = judge(resource, *members, nodes=slices(resource, **shown), now=NOW + after_s)
    condition = find(decision, "NodesJoined")
    assert f"{decision.status.joined} {condition.status}/{condition.reason}" == found
    assert words in condition.message
    assert shown is not TWO_HOSTS or "10.0.0.1" in condition.message, "the one that never came"


NOT_JOINED = {
    "it hasn't come": ((member(0),), "team-v5e-1: hosts at 10.0.0.1"),
    "it isn't Ready": ((member(0), member(1, ready=False)), "team-v5e-1: host-1 not Ready"),
    "its label names the other one": ((member(0), member(1, slice_id="team-v5e-0")), "team-v5e-1"),
    "its label names no slice": ((member(0), member(1, slice_id="strange")), "team-v5e-1"),
}


@pytest.mark.parametrize(("members", "text"), NOT_JOINED.values(), ids=NOT_JOINED)
def test_a_host_is_missing_while(members: tuple[Node, ...], text: str) -> None:
    resource = active(**TWO)
    joining = judge(resource, *members)
    check(joining, "NodesJoined", "False/Joining", text)
    assert joining.status.joined == "1/2"
    late = find(judge(resource, *members, now=NOW + LATE_S), "NodesJoined")
    assert late.reason == "JoinTimeout"
    assert "journalctl" in late.message


def test_a_slice_that_is_not_listed_has_not_joined() -> None:
    resource = active(**TWO)
    decision = judge(resource, member(0), nodes=slices(resource)[:1])
    assert "team-v5e-1" in find(decision, "NodesJoined").message
    assert decision.status.joined == "1/?"


def test_a_host_that_goes_missing_later_has_the_whole_time_to_come_back() -> None:
    resource = active()
    resource = after(resource, judge(resource, HOST, now=NOW + 60))
    gone_at = NOW + 5 * 86_400
    decision = judge(resource, SILENT, now=gone_at)
    assert reason(decision) == "Joining"
    resource = after(resource, decision)
    assert read_queued_machines(resource.to_raw()).join_deadline == gone_at + 900
    assert reason(judge(resource, SILENT, now=gone_at + 899)) == "Joining"
    assert reason(judge(resource, SILENT, now=gone_at + 900)) == "JoinTimeout"
    resource = after(resource, judge(resource, HOST, now=gone_at + 950))
    assert reason(judge(resource, SILENT, now=gone_at + 1000)) == "Joining"
    cordoned = after(active(), judge(active(), CORDONED, now=NOW + 60))
    assert reason(judge(cordoned, SILENT, now=NOW + 9000)) == "Joining"


def test_the_join_deadline_is_looked_at_in_time() -> None:
    decision = judge(active(active_s=890))
    assert decision.requeue_after_s is not None
    assert decision.requeue_after_s <= 10


@pytest.mark.parametrize(
    ("tier", "asked", "on", "mismatch"),
    [
        ("guaranteed", None, True, False),
        ("guaranteed", None, False, True),
        ("guaranteed", False, True, True),
        ("spot", None, False, False),
        ("spot", None, True, True),
        ("spot", True, True, False),
        ("bestEffort", None, False, False),
        ("spot", None, None, False),
    ],
)
def test_autocheckpoint_is_read_back(
    tier: str, asked: bool | None, on: bool | None, *, mismatch: bool
) -> None:
    resource = active(tier={tier: {}}, slices={} if asked is None else {"autocheckpointEnabled": asked})
    decision = judge(resource, HOST, nodes=slices(resource, autocheckpoint_enabled=on))
    assert (reason(decision, "Degraded") == "AutocheckpointMismatch") is mismatch
    assert decision.status.autocheckpoint == {True: "On", False: "Off", None: ""}[on]
    assert decision.actions == ()


@pytest.mark.parametrize(
    ("changes", "problem", "words"),
    [
        (
            {"health": "UNHEALTHY_TENSORFLOW", "health_description": "chip 3 is down"},
            "SliceUnhealthy",
            "UnhealthyTensorflow: chip 3 is down",
        ),
        ({"state": "STOPPED"}, "SliceNotReady", "team-v5e is Stopped"),
        ({"state": "UNKNOWN"}, "SliceNotReady", "team-v5e is Unknown"),
        ({"state": "READY"}, "AsExpected", ""),
    ],
)
def test_a_slice_that_is_not_well_is_a_problem_of_an_active_resource(
    changes: dict[str, Any], problem: str, words: str
) -> None:
    resource = active(tier={"guaranteed": {}}, slices={"autocheckpointEnabled": False})
    degraded = find(judge(resource, HOST, nodes=slices(resource, **changes)), "Degraded")
    assert (degraded.status == "True", degraded.reason) == (problem != "AsExpected", problem)
    assert words in degraded.message


def test_slices_that_are_being_made_are_no_problem() -> None:
    cloud = make_cloud_resource(active(), "PROVISIONING")
    decision = decide(active(), observe(cloud, nodes=[make_node(cloud, state="CREATING")]))
    assert find(decision, "Degraded").status == "False"


def test_a_large_status_stays_bounded_and_shows_the_worst_first() -> None:
    resource = active(slices={"count": 200})
    nodes = slices(resource, symptoms=("x" * 5000,) * 50, health_description="y" * 5000)
    nodes[150] = replace(nodes[150], health="TIMEOUT")
    status = judge(resource, *map(member, range(200)), nodes=nodes).status
    assert len(status.slices) == MAX_SLICES
    assert status.slice_count == 200
    assert status.slices[0].name == "team-v5e-150"
    type(status).model_validate(status.to_raw())


def test_a_long_silence_of_the_cloud_is_told_and_keeps_what_was_seen() -> None:
    resource = after(active(), judge(active(), HOST))
    error = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "down")
    blind = Observed(cluster_id="cluster-uid", error=error, listed_at=NOW)
    assert not decide(resource, blind, now=NOW + 299).write_status
    told = decide(resource, blind, now=NOW + 300)
    assert reason(told, "Degraded") == "CloudUnreachable"
    assert told.status.joined == "1/1"
    assert find(told, "Active").status == "True"


START = int(NOW)


def window(status: str, start: int | None, end: int | None = None) -> CloudMaintenance:
    return CloudMaintenance(type="SCHEDULED", status=status, window_start=start, window_end=end)


def announce(*windows: CloudMaintenance | None, before: Decision | None = None, now: float = NOW) -> Decision:
    """Decide about one with a window for each slice, perhaps after an earlier decision."""
    resource = active(slices={"count": len(windows)})
    resource = resource if before is None else after(resource, before)
    nodes = [replace(node, maintenance=each) for node, each in zip(slices(resource), windows, strict=True)]
    return judge(resource, nodes=nodes, now=now)


AHEAD, ONGOING = window("PENDING", START + 900, START + 4500), window("ONGOING", START - 600)


@pytest.mark.parametrize(
    ("windows", "next_start", "named"),
    [
        ((ONGOING, AHEAD), START + 900, "team-v5e-1"),
        ((window("PENDING", START - 60), AHEAD), START + 900, "team-v5e-1"),
        ((window("PENDING", None), AHEAD), START + 900, "team-v5e-1"),
        ((AHEAD, window("PENDING", START + 60)), START + 60, "team-v5e-1"),
        ((None, ONGOING), START - 600, "team-v5e-1"),
        ((window("ONGOING", START - 900), ONGOING), START - 600, "team-v5e-1"),
        ((None, window("PENDING", None)), None, "team-v5e-1"),
        ((window("PENDING", START - 7200, START - 3600), AHEAD), START + 900, "team-v5e-1"),
    ],
)
def test_the_next_window_is_told_whatever_else_is_announced(
    windows: tuple[CloudMaintenance | None, ...], next_start: int | None, named: str
) -> None:
    decision = announce(*windows)
    assert decision.status.next_maintenance_time == next_start
    message = find(decision, "MaintenanceScheduled").message
    assert message.startswith(f"slice {named}")
    over = windows[0] is not None and windows[0].window_end == START - 3600
    assert ("1 more" in message) is (windows[0] is not None and not over)


PAST = f"began at {render_time(START - 7200)} and ended at {render_time(START - 3600)}"
COMES = f"begins at {render_time(START + 900)} and ends at {render_time(START + 4500)}"


@pytest.mark.parametrize(
    ("announced", "said", "words", "promised"),
    [
        (AHEAD, "True/MaintenanceAnnounced", COMES, True),
        (window("PENDING", None), "True/MaintenanceAnnounced", "", False),
        (window("PENDING", START - 600, START + 60), "True/MaintenanceAnnounced", "began at", False),
        (window("ONGOING", START - 600, START + 60), "True/MaintenanceOngoing", "began at", False),
        (window("UNKNOWN(9)", START - 600, START + 60), "True/MaintenanceAnnounced", "began at", False),
        (window("PENDING", START - 7200, START - 3600), "False/Over", PAST, False),
        (
            window("ONGOING", START - 7200, START - 3600),
            "True/MaintenanceOngoing",
            f"though its window {PAST}",
            False,
        ),
        (window("PENDING", None, START - 3600), "False/Over", "Pending, its window ended at", False),
        (
            window("ONGOING", None, START - 3600),
            "True/MaintenanceOngoing",
            "though its window ended at",
            False,
        ),
    ],
)
def test_a_window_is_told_with_its_times_and_a_save_is_promised_only_before_it_begins(
    announced: CloudMaintenance, said: str, words: str, *, promised: bool
) -> None:
    condition = find(announce(announced), "MaintenanceScheduled")
    assert f"{condition.status}/{condition.reason}" == said
    assert words in condition.message
    assert ("Jobs on it save before it begins" in condition.message) is promised


def test_each_window_is_told_by_an_event_of_its_own_and_its_end_by_none() -> None:
    first = announce(ONGOING, None)
    assert [event.reason for event in first.events if "maintenance" in event.message.lower()] == [
        "MaintenanceOngoing"
    ]
    second = announce(ONGOING, AHEAD, before=first)
    assert len([event for event in second.events if "team-v5e-1" in event.message]) == 1
    assert "maintenance of team-v5e-0 is ongoing" in find(second, "MaintenanceScheduled").message
    shown = second.status.slices[1].upcoming_maintenance
    assert shown is not None
    assert (shown.status, shown.type) == ("Pending", "Scheduled")
    again = announce(ONGOING, AHEAD, before=second)
    assert (again.events, again.write_status) == ((), False)
    listed = window("PENDING", START - 7200, START - 3600)
    over = announce(listed, before=announce(listed, now=START - 5000))
    assert not [event for event in over.events if "maintenance" in event.message.lower()]
    assert not announce(listed, before=over).write_status
