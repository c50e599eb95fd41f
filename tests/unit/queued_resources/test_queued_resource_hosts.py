"""Test which hosts count as joined, and what is said where the cloud doesn't tell how many there are."""

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
    noted,
    observe,
)
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.facts.queued_resource import read_queued_machines
from stepkeeper_operator.queued_resources.decision import Decision
from stepkeeper_operator.queued_resources.observed import Member

HOST = Member(name="host-0", uid="n0", cloud_node="team-v5e", addresses=("10.0.0.0",))
SILENT = replace(HOST, ready=False)


def make_active(**spec: object) -> QueuedResource:
    return noted(created(QueuedResourceState.ACTIVE, **spec), active_since=int(NOW))


def judge(resource: QueuedResource, *members: Member, n_hosts: int = 1, now: float = NOW) -> Decision:
    cloud = make_cloud_resource(resource, "ACTIVE")
    addresses = tuple(f"10.0.0.{index}" for index in range(n_hosts))
    node = make_node(cloud, n_hosts=n_hosts, addresses=addresses)
    return decide(resource, observe(cloud, nodes=[node], members=members), now=now)


@pytest.mark.parametrize("members", [(), (HOST,)], ids=["nobody", "one host"])
def test_hosts_that_the_cloud_does_not_count_are_unknown_and_not_one(members: tuple[Member, ...]) -> None:
    decision = judge(make_active(), *members, n_hosts=0)
    condition = find(decision, "NodesJoined")
    assert (condition.status, condition.reason) == ("Unknown", "HostsUnknown")
    assert "team-v5e" in condition.message
    assert decision.status.joined == f"{len(members)}/?"
    assert decision.status.nodes[0].hosts == 0
    late = find(judge(make_active(), *members, n_hosts=0, now=NOW + 900), "NodesJoined")
    assert (late.status, late.reason) == ("False", "JoinTimeout")
    assert "doesn't say how many hosts" in late.message


def test_a_cordoned_host_has_not_joined_and_the_message_says_what_to_do() -> None:
    decision = judge(make_active(), replace(HOST, cordoned=True), now=NOW + 5000)
    condition = find(decision, "NodesJoined")
    assert (condition.status, condition.reason) == ("False", "Cordoned")
    assert "kubectl uncordon host-0" in condition.message
    assert decision.status.joined == "0/1"


def test_a_host_that_goes_missing_later_has_the_whole_time_to_come_back() -> None:
    resource = make_active()
    resource = after(resource, judge(resource, HOST, now=NOW + 60))
    gone_at = NOW + 5 * 86_400
    decision = judge(resource, SILENT, now=gone_at)
    assert find(decision, "NodesJoined").reason == "Joining"
    resource = after(resource, decision)
    assert read_queued_machines(resource.to_raw()).join_deadline == gone_at + 900
    assert find(judge(resource, SILENT, now=gone_at + 899), "NodesJoined").reason == "Joining"
    assert find(judge(resource, SILENT, now=gone_at + 900), "NodesJoined").reason == "JoinTimeout"
    resource = after(resource, judge(resource, HOST, now=gone_at + 950))
    assert find(judge(resource, SILENT, now=gone_at + 1000), "NodesJoined").reason == "Joining"


def test_a_host_that_goes_missing_while_another_is_cordoned_has_the_whole_time_too() -> None:
    resource = make_active()
    resource = after(resource, judge(resource, replace(HOST, cordoned=True), now=NOW + 60))
    assert find(judge(resource, SILENT, now=NOW + 9000), "NodesJoined").reason == "Joining"


def test_a_cordoned_host_does_not_hide_one_that_never_came() -> None:
    resource = make_active()
    both = judge(resource, replace(HOST, cordoned=True), n_hosts=2, now=NOW + 5000)
    condition = find(both, "NodesJoined")
    assert condition.reason == "JoinTimeout"
    assert "kubectl uncordon host-0" in condition.message
    assert "10.0.0.1" in condition.message


def test_a_silent_host_does_not_hide_one_that_never_came() -> None:
    condition = find(judge(make_active(), replace(HOST, ready=False), n_hosts=2), "NodesJoined")
    assert "host-0 not Ready" in condition.message
    assert "10.0.0.1" in condition.message


def test_a_slice_that_is_not_listed_has_not_joined() -> None:
    resource = make_active(node={"count": 2})
    cloud = make_cloud_resource(resource, "ACTIVE")
    host = replace(HOST, cloud_node="team-v5e-0")
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud)], members=(host,)))
    condition = find(decision, "NodesJoined")
    assert (condition.status, condition.reason) == ("False", "Joining")
    assert "team-v5e-1" in condition.message
    assert decision.status.joined == "1/?"
