"""Test that the cloud in memory keeps to what the Cloud TPU API documents, where the operator depends on it."""

import uuid
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import CLUSTER_ID, PLACE, make_resource
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, CloudTPUError
from stepkeeper_operator.queued_resources.request import build_request
from tpuapi.accelerators import read_accelerator
from tpuapi.cloud import FakeCloud

ALPHA = ApiVersion.V2ALPHA1
ID = "team-v5e"


def request_of(cloud_id: str = ID, changes: dict[str, Any] | None = None, **spec: Any) -> CloudRequest:
    """Make a request as the operator does, with changes to its node."""
    made = build_request(make_resource(**spec), number=0, cluster_id=CLUSTER_ID, script=None)
    ids = tuple(node_id.replace(ID, cloud_id) for node_id in made.node_ids)
    return replace(made, id=cloud_id, node_ids=ids, request_id="", node={**made.node, **(changes or {})})


async def active(cloud: FakeCloud, **spec: Any) -> None:
    await cloud.create_queued_resource(request_of(**spec))
    while state_of(cloud) != "ACTIVE":
        assert cloud.step_to_next() > 0


def state_of(cloud: FakeCloud, cloud_id: str = ID) -> str:
    return cloud.resources[PLACE, cloud_id].state


def node_state(cloud: FakeCloud, node_id: str = ID) -> str:
    return cloud.nodes[PLACE, node_id].state


async def code_of(cloud: FakeCloud, request: CloudRequest) -> str:
    with pytest.raises(CloudTPUError) as refused:
        await cloud.create_queued_resource(request)
    return refused.value.code


REFUSED: dict[str, tuple[CloudRequest, str]] = {
    "queued_resource_id: should follow ^[A-Za-z0-9_.~+%-]+$": (request_of("a/b"), "INVALID_ARGUMENT"),
    "runtime_version: Required": (request_of(changes={"runtime_version": "none"}), "INVALID_ARGUMENT"),
    "accelerator_type: one that is offered": (
        request_of(changes={"accelerator_type": "v9-8"}),
        "INVALID_ARGUMENT",
    ),
    "accelerator_type or accelerator_config": (
        request_of(changes={"accelerator_config": {"type": "V5P", "topology": "2x2x1"}}),
        "INVALID_ARGUMENT",
    ),
    "labels: keys start with a lower-case letter": (
        request_of(changes={"labels": {"Team": "x"}}),
        "INVALID_ARGUMENT",
    ),
    "labels: no dots in values": (request_of(changes={"labels": {"team": "x.y"}}), "INVALID_ARGUMENT"),
    "tags: RFC 1035": (request_of(changes={"tags": ["-web"]}), "INVALID_ARGUMENT"),
    "request_id: UUID": (replace(request_of(), request_id="first"), "INVALID_ARGUMENT"),
    "request_id: the zero UUID is not supported": (
        replace(request_of(), request_id=str(uuid.UUID(int=0))),
        "INVALID_ARGUMENT",
    ),
    "autocheckpoint_enabled: v2alpha1 only": (
        request_of(changes={"autocheckpoint_enabled": True}),
        "INVALID_ARGUMENT",
    ),
    "valid_until_time: not in the past": (
        request_of(queueing={"validUntilTime": "2020-01-01T00:00:00Z"}),
        "INVALID_ARGUMENT",
    ),
    "reservation_name: one that exists": (
        replace(request_of(), reservation_name=f"{PLACE.parent}/reservations/r"),
        "NOT_FOUND",
    ),
}


@pytest.mark.parametrize(("request_", "code"), REFUSED.values(), ids=REFUSED)
async def test_what_the_documentation_forbids_is_refused(request_: CloudRequest, code: str) -> None:
    cloud = FakeCloud()
    assert await code_of(cloud, request_) == code
    assert not cloud.resources


@pytest.mark.parametrize(
    ("node", "n_hosts", "chips_per_host"),
    [
        ({"accelerator_type": "v5litepod-8"}, 1, 8),
        ({"accelerator_type": "v5litepod-16"}, 4, 4),
        ({"accelerator_type": "v4-16"}, 2, 4),
        ({"accelerator_type": "v6e-1"}, 1, 1),
        ({"accelerator_config": {"type": "V5P", "topology": "2x2x4"}}, 4, 4),
    ],
)
def test_hosts_have_4_chips_or_the_one_host_of_v5e_and_v6e_up_to_8(
    node: dict[str, Any], n_hosts: int, chips_per_host: int
) -> None:
    accelerator = read_accelerator(node)
    assert (accelerator.n_hosts, accelerator.n_chips // accelerator.n_hosts) == (n_hosts, chips_per_host)


async def test_a_name_is_taken_once_and_so_is_that_of_a_node() -> None:
    cloud = FakeCloud()
    await cloud.create_queued_resource(request_of())
    assert await code_of(cloud, request_of()) == "ALREADY_EXISTS"
    assert await code_of(cloud, replace(request_of("other"), node_ids=(ID,))) == "ALREADY_EXISTS"


async def test_a_request_id_is_remembered_for_its_request_alone() -> None:
    cloud, request_id = FakeCloud(), str(uuid.uuid4())
    asked = replace(request_of(), request_id=request_id)
    operation = await cloud.create_queued_resource(asked)
    assert await cloud.create_queued_resource(asked) == operation
    assert await code_of(cloud, replace(request_of("other"), request_id=request_id)) == "INVALID_ARGUMENT"
    cloud.step(3601)
    assert await code_of(cloud, asked) == "ALREADY_EXISTS"


async def test_states_pass_in_their_order_and_the_operation_is_done_with_the_first() -> None:
    cloud = FakeCloud()
    operation = await cloud.create_queued_resource(request_of())
    seen = [state_of(cloud)]
    cloud.set_timings(accepted_s=5)
    cloud.set_capacity("v5litepod", 0)
    for _ in range(2):
        cloud.step_to_next()
        seen.append(state_of(cloud))
    found = await cloud.get_operation(operation, ALPHA)
    assert found is not None
    assert found.done
    cloud.set_capacity("v5litepod", None)
    seen.append(state_of(cloud))
    cloud.step_to_next()
    seen.append(state_of(cloud))
    assert seen == ["CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


async def test_first_come_is_first_served_and_what_does_not_fit_blocks_no_smaller_one() -> None:
    cloud = FakeCloud()
    cloud.set_capacity("v5litepod", 8)
    await cloud.create_queued_resource(request_of("large", {"accelerator_type": "v5litepod-16"}))
    await cloud.create_queued_resource(request_of("first"))
    await cloud.create_queued_resource(request_of("second"))
    cloud.step(100)
    assert [r.state for r in cloud.resources.values()] == [
        "WAITING_FOR_RESOURCES",
        "ACTIVE",
        "WAITING_FOR_RESOURCES",
    ]


async def test_what_can_not_be_fulfilled_in_its_time_fails_and_stays() -> None:
    cloud = FakeCloud()
    cloud.set_capacity("v5litepod", 0)
    await cloud.create_queued_resource(request_of(queueing={"validUntilSeconds": 60}))
    cloud.step(59)
    assert state_of(cloud) == "WAITING_FOR_RESOURCES"
    cloud.step(1)
    resource = cloud.resources[PLACE, ID]
    assert (resource.state, resource.error_code) == ("FAILED", "DEADLINE_EXCEEDED")


async def test_a_preempted_node_suspends_its_queued_resource_which_needs_quota_until_it_is_deleted() -> None:
    """SUSPENDED: "some of the QueuedResource's nodes have been deleted"."""
    cloud = FakeCloud()
    cloud.set_quota("v5litepod", 16)
    await active(cloud)
    cloud.preempt(ID)
    assert (node_state(cloud), state_of(cloud)) == ("PREEMPTED", "ACTIVE")
    cloud.step(10)
    assert state_of(cloud) == "SUSPENDING"
    cloud.step(15)
    resource = cloud.resources[PLACE, ID]
    assert (resource.state, resource.initiator) == ("SUSPENDED", "SERVICE")
    assert not cloud.nodes
    cloud.set_quota("v5litepod", 8)
    assert await code_of(cloud, request_of("next")) == "RESOURCE_EXHAUSTED"
    cloud.delete(ID)
    cloud.step(10)
    await cloud.create_queued_resource(request_of("next"))


@pytest.mark.parametrize("exited", [True, False])
async def test_maintenance_waits_5_minutes_for_the_processes_of_a_node_with_autocheckpoint(
    *, exited: bool
) -> None:
    cloud, events = FakeCloud(), list[tuple[str, str, float | None]]()
    cloud.hooks.append(lambda event: events.append((event.kind, event.reason, event.grace_s)))
    await active(cloud, tier={"guaranteed": {}})
    cloud.announce_maintenance(ID, starts_in_s=600, lasts_s=1800)
    cloud.step(600)
    node = cloud.nodes[PLACE, ID]
    assert node.maintenance is not None
    assert (node.state, node.maintenance.status) == ("READY", "ONGOING")
    if exited:
        cloud.processes_exited(ID)
    else:
        cloud.step(299)
        assert node_state(cloud) == "READY"
        cloud.step(1)
    assert (node_state(cloud), state_of(cloud)) == ("REPAIRING", "ACTIVE")
    cloud.step(1800)
    assert (node_state(cloud), state_of(cloud)) == ("READY", "ACTIVE")
    assert events == [
        ("ready", "created", None),
        ("terminating", "maintenance", 300),
        ("gone", "maintenance", None),
        ("ready", "repaired", None),
    ]


async def test_without_autocheckpoint_it_waits_for_nothing_and_a_node_may_not_come_back() -> None:
    """TERMINATED: "TPU node has been terminated due to maintenance"."""
    cloud = FakeCloud()
    await active(cloud)
    cloud.announce_maintenance(ID, starts_in_s=600, ends_in="TERMINATED")
    cloud.step(600)
    assert node_state(cloud) == "TERMINATED"
    cloud.step(25)
    assert state_of(cloud) == "SUSPENDED"


async def test_a_deleted_node_costs_its_queued_resource_all_of_them() -> None:
    cloud = FakeCloud()
    await active(cloud, node={"count": 2})
    cloud.delete_node(f"{ID}-1")
    assert {node.state for node in cloud.nodes.values()} == {"DELETING"}
    cloud.step(15)
    resource = cloud.resources[PLACE, ID]
    assert (resource.state, resource.initiator) == ("SUSPENDED", "USER")


async def test_a_deletion_ends_what_is_under_way() -> None:
    cloud = FakeCloud()
    creation = await cloud.create_queued_resource(request_of())
    deletion = await cloud.delete_queued_resource(PLACE, ID, request_id="", version=ALPHA)
    assert deletion is not None
    with pytest.raises(CloudTPUError, match="FAILED_PRECONDITION"):
        await cloud.delete_queued_resource(PLACE, ID, request_id="", version=ALPHA)
    cloud.step(10)
    assert not cloud.resources
    ended = [await cloud.get_operation(name, ALPHA) for name in (creation, deletion)]
    assert [e and (e.done, e.error and e.error.code) for e in ended] == [(True, "ABORTED"), (True, None)]
