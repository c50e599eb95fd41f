"""Test the conditions of an active QueuedResource: joining, autocheckpoint, maintenance, health; and its request."""

from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import (
    make_cloud_resource,
    make_node,
    make_resource,
    observe,
)
from stepkeeper_operator.api.v1alpha1.conditions import Condition
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    MAX_NODES,
    QueuedResourceBookkeeping,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudMaintenance,
    CloudNode,
    CloudTPUError,
    ErrorKind,
)
from stepkeeper_operator.queued_resources.decide.queued_resource import decide_queued_resource
from stepkeeper_operator.queued_resources.decision import Decision
from stepkeeper_operator.queued_resources.naming import (
    make_cloud_id,
    make_node_ids,
    parse_cloud_name,
    parse_number,
)
from stepkeeper_operator.queued_resources.observed import Member, Observed
from stepkeeper_operator.queued_resources.request import build_request, choose_api_version, hash_spec
from stepkeeper_operator.queued_resources.settings import CloudSettings

NOW = 10_000.0


def active(*, active_s: int = 0, **spec: Any) -> QueuedResource:
    resource = make_resource(**spec)
    bookkeeping = QueuedResourceBookkeeping(
        created=True, spec_hash=hash_spec(resource.spec), active_since=int(NOW) - active_s
    )
    status = QueuedResourceStatus(state=QueuedResourceState.ACTIVE, bookkeeping=bookkeeping)
    return resource.model_copy(update={"status": status})


def slices(resource: QueuedResource, **changes: Any) -> list[CloudNode]:
    cloud = make_cloud_resource(resource, "ACTIVE")
    return [make_node(cloud, index, **changes) for index in range(len(cloud.node_ids))]


def judge(resource: QueuedResource, nodes: list[CloudNode], *members: Member, now: float = NOW) -> Decision:
    cloud = make_cloud_resource(resource, "ACTIVE")
    observed = observe(cloud, nodes=nodes, members=members)
    return decide_queued_resource(resource, observed, CloudSettings(), now=now)


def find(decision: Decision, kind: str) -> Condition:
    return next(condition for condition in decision.status.conditions if condition.type == kind)


def test_fields_that_are_not_known_are_named_and_change_nothing_else() -> None:
    resource = active(node={"futureDisk": 1}, futureBudget={})
    decision = judge(resource, slices(resource))
    degraded = find(decision, "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "UnknownFields")
    assert "doesn't know spec.futureBudget, spec.node.futureDisk" in degraded.message
    assert decision.actions == judge(active(), slices(active())).actions


def member(index: int, **changes: Any) -> Member:
    made = Member(name=f"host-{index}", uid=f"n{index}", cloud_node=f"team-v5e-{index}")
    return replace(made, **changes)


def test_all_hosts_have_joined() -> None:
    resource = active(node={"count": 2})
    decision = judge(resource, slices(resource), member(0), member(1))
    assert find(decision, "NodesJoined").status == "True"
    assert decision.status.joined == "2/2"


NOT_JOINED = {
    "it hasn't come": ((member(0),), "team-v5e-1: hosts at 10.0.0.1"),
    "it isn't Ready": ((member(0), member(1, ready=False)), "team-v5e-1: host-1 not Ready"),
    "its label names the other one": ((member(0), member(1, cloud_node="team-v5e-0")), "team-v5e-1"),
    "its label names nobody's": ((member(0), member(1, cloud_node="strange")), "team-v5e-1"),
}


@pytest.mark.parametrize(("members", "text"), NOT_JOINED.values(), ids=NOT_JOINED)
def test_a_host_is_missing_while(members: tuple[Member, ...], text: str) -> None:
    resource = active(node={"count": 2})
    joining = judge(resource, slices(resource), *members)
    condition = find(joining, "NodesJoined")
    assert (condition.status, condition.reason) == ("False", "Joining")
    assert text in condition.message
    assert joining.status.joined == "1/2"
    late = judge(resource, slices(resource), *members, now=NOW + 900)
    assert find(late, "NodesJoined").reason == "JoinTimeout"
    assert "journalctl" in find(late, "NodesJoined").message


def test_a_host_without_a_label_is_known_by_its_address() -> None:
    resource = active()
    host = Member(name="h", uid="n", addresses=("10.0.0.0",))
    assert find(judge(resource, slices(resource), host), "NodesJoined").status == "True"


def test_the_join_deadline_is_looked_at_in_time() -> None:
    resource = active(active_s=890)
    decision = judge(resource, slices(resource))
    assert decision.requeue_after_s is not None
    assert decision.requeue_after_s <= 10


@pytest.mark.parametrize(
    ("tier", "asked", "on", "mismatch"),
    [
        ({"guaranteed": {}}, None, True, False),
        ({"guaranteed": {}}, None, False, True),
        ({"guaranteed": {}}, False, True, True),
        ({"spot": {}}, None, False, False),
        ({"spot": {}}, None, True, True),
        ({"spot": {}}, True, True, False),
        ({"bestEffort": {}}, None, False, False),
        ({"spot": {}}, None, None, False),
    ],
)
def test_autocheckpoint_is_read_back(
    tier: dict[str, Any], asked: bool | None, on: bool | None, *, mismatch: bool
) -> None:
    node = {} if asked is None else {"autocheckpointEnabled": asked}
    resource = active(tier=tier, node=node)
    decision = judge(resource, slices(resource, autocheckpoint_enabled=on), member(0, cloud_node="team-v5e"))
    degraded = find(decision, "Degraded")
    assert (degraded.reason == "AutocheckpointMismatch") is mismatch
    assert decision.status.autocheckpoint == {True: "On", False: "Off", None: ""}[on]
    assert decision.actions == ()


VERSIONS = [
    ({"tier": {"spot": {}}}, ApiVersion.V2, "v2"),
    ({"tier": {"guaranteed": {}}}, ApiVersion.V2ALPHA1, "autocheckpoint"),
    (
        {"tier": {"guaranteed": {}}, "node": {"autocheckpointEnabled": False}},
        ApiVersion.V2,
        "nothing in the spec",
    ),
    ({"tier": {"bestEffort": {}}}, ApiVersion.V2ALPHA1, "bestEffort"),
    (
        {"tier": {"guaranteed": {"reserved": True}}, "node": {"autocheckpointEnabled": False}},
        ApiVersion.V2ALPHA1,
        "reserved",
    ),
]


@pytest.mark.parametrize(("spec", "version", "why"), VERSIONS)
def test_the_version_of_the_api_follows_from_the_spec(
    spec: dict[str, Any], version: ApiVersion, why: str
) -> None:
    chosen, reason = choose_api_version(make_resource(**spec).spec)
    assert chosen is version
    assert why in reason


def test_maintenance_is_announced_with_its_window() -> None:
    resource = active(node={"count": 2})
    maintenance = CloudMaintenance(type="SCHEDULED", status="PENDING", window_start=20_000, window_end=23_600)
    nodes = slices(resource)
    nodes[1] = replace(nodes[1], maintenance=maintenance)
    decision = judge(resource, nodes, member(0), member(1))
    condition = find(decision, "MaintenanceScheduled")
    assert (condition.status, condition.reason) == ("True", "Pending")
    assert "1970-01-01T05:33:20Z to 1970-01-01T06:33:20Z" in condition.message
    assert decision.status.next_maintenance_time == 20_000
    shown = decision.status.nodes[1].upcoming_maintenance
    assert shown is not None
    assert (shown.status, shown.type) == ("Pending", "Scheduled")
    assert "Pending" in {event.reason for event in decision.events}


def test_an_unhealthy_node_is_a_problem_with_the_clouds_words() -> None:
    resource = active()
    nodes = slices(resource, health="UNHEALTHY_TENSORFLOW", health_description="chip 3 is down")
    degraded = find(judge(resource, nodes), "Degraded")
    assert degraded.reason == "NodeUnhealthy"
    assert "UnhealthyTensorflow: chip 3 is down" in degraded.message


@pytest.mark.parametrize(
    ("state", "told"),
    [("STOPPED", True), ("REPAIRING", True), ("UNKNOWN", True), ("HIDDEN", True), ("READY", False)],
)
def test_a_slice_that_is_not_ready_is_a_problem_of_an_active_resource(state: str, *, told: bool) -> None:
    resource = active(tier={"guaranteed": {}}, node={"autocheckpointEnabled": False})
    degraded = find(
        judge(resource, slices(resource, state=state), member(0, cloud_node="team-v5e")), "Degraded"
    )
    assert (degraded.status == "True") is told
    if told:
        assert degraded.reason == "NodeNotReady"
        assert f"team-v5e is {state.capitalize()}" in degraded.message


def test_slices_that_are_being_made_are_no_problem() -> None:
    resource = active()
    cloud = make_cloud_resource(resource, "PROVISIONING")
    decision = decide_queued_resource(
        resource, observe(cloud, nodes=[make_node(cloud, state="CREATING")]), CloudSettings(), now=NOW
    )
    assert find(decision, "Degraded").status == "False"


def test_a_large_status_stays_bounded_and_shows_the_worst_first() -> None:
    resource = active(node={"count": 200})
    nodes = slices(resource, symptoms=("x" * 5000,) * 50, health_description="y" * 5000)
    nodes[150] = replace(nodes[150], health="TIMEOUT")
    members = [member(index) for index in range(200)]
    status = judge(resource, nodes, *members).status
    assert len(status.nodes) == MAX_NODES
    assert status.node_count == 200
    assert status.nodes[0].name == "team-v5e-150"
    type(status).model_validate(status.to_raw())


def test_hosts_that_come_one_by_one_are_not_written_one_by_one() -> None:
    resource = active(node={"count": 3})
    first = judge(resource, slices(resource), member(0))
    resource = resource.model_copy(update={"status": first.status})
    cloud = make_cloud_resource(resource, "ACTIVE")
    seen = observe(cloud, nodes=slices(resource), members=(member(0), member(1)), last_write_at=NOW)
    soon = decide_queued_resource(resource, seen, CloudSettings(), now=NOW + 1)
    assert not soon.write_status
    later = decide_queued_resource(resource, seen, CloudSettings(), now=NOW + 5)
    assert later.write_status
    assert later.status.joined == "2/3"


def test_a_long_silence_of_the_cloud_is_told_and_keeps_what_was_seen() -> None:
    resource = active()
    seen = judge(resource, slices(resource), member(0, cloud_node="team-v5e"))
    resource = resource.model_copy(update={"status": seen.status})
    error = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "down")
    blind = Observed(cluster_id="cluster-uid", error=error, listed_at=NOW)
    assert not decide_queued_resource(resource, blind, CloudSettings(), now=NOW + 299).write_status
    told = decide_queued_resource(resource, blind, CloudSettings(), now=NOW + 300)
    assert find(told, "Degraded").reason == "CloudUnreachable"
    assert told.status.joined == "1/1"
    assert find(told, "Active").status == "True"


def test_names_are_stable_bounded_and_readable_back() -> None:
    assert make_cloud_id("team", "v5e", 0) == "team-v5e"
    assert make_cloud_id("team", "v5e", 12) == "team-v5e-r12"
    assert parse_number("team", "v5e", "team-v5e-r12") == 12
    assert parse_number("team", "v5e", "team-v5e2") is None
    assert make_cloud_id("1st", "x", 0)[0].isalpha()
    long = make_cloud_id("n" * 63, "q" * 40, 999)
    assert len(f"{long}-255") <= 63
    assert long != make_cloud_id("n" * 63, "q" * 39, 999)
    parsed = parse_cloud_name("projects/p/locations/z/queuedResources/i")
    assert parsed is not None
    assert (parsed[0].project, parsed[0].zone, parsed[1]) == ("p", "z", "i")


def test_the_request_names_owner_labels_and_script() -> None:
    resource = make_resource(
        node={
            "count": 2,
            "labels": {"team": "a"},
            "metadata": {"k": "v"},
            "network": {"network": "net"},
            "serviceAccount": {"email": "x@y.iam"},
            "dataDisks": [{"sourceDisk": "d", "mode": "ReadWrite"}],
            "secureBoot": True,
            "autocheckpointEnabled": True,
        },
        queueing={"validUntilSeconds": 600},
    )
    request = build_request(resource, number=1, cluster_id="c", script="#!/bin/sh")
    assert request.node["labels"] == {
        "team": "a",
        "stepkeeper-cluster": "c",
        "stepkeeper-namespace": "team",
        "stepkeeper-name": "v5e",
        "stepkeeper-uid": "uid-1",
    }
    assert request.node["metadata"]["startup-script"] == "#!/bin/sh"
    assert "stepkeeper.dev/queued-resource-uid=uid-1" in request.node["metadata"]["stepkeeper-node-labels"]
    assert request.node["network_config"] == {"network": "net"}
    assert request.node["data_disks"] == [{"source_disk": "d", "mode": "READ_WRITE"}]
    assert request.node["shielded_instance_config"] == {"enable_secure_boot": True}
    assert request.node["autocheckpoint_enabled"] is True
    assert request.queueing == {"valid_until_duration": "600s"}
    assert request.node_ids == ("team-v5e-r1-0", "team-v5e-r1-1")
    assert make_node_ids(resource, "x") == (("x-0", "x-1"), "x")


HASHED: dict[str, tuple[dict[str, Any], bool]] = {
    "another tier": ({"tier": {"guaranteed": {}}}, True),
    "another image": ({"node": {"runtimeVersion": "x"}}, True),
    "a reservation": ({"reservation_name": "r"}, True),
    "a deadline": ({"queueing": {"validUntilSeconds": 600}}, True),
    "a default written out": ({"node": {"count": 1}}, False),
    "another policy": ({"deletion_policy": "Retain", "join_timeout_seconds": 100}, False),
}


@pytest.mark.parametrize(("spec", "changes"), HASHED.values(), ids=HASHED)
def test_the_hash_changes_with_what_the_cloud_cannot_change(spec: dict[str, Any], *, changes: bool) -> None:
    assert (hash_spec(make_resource(**spec).spec) != hash_spec(make_resource().spec)) is changes
