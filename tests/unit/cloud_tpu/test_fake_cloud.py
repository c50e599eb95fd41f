"""Test that the cloud in memory keeps to what the Cloud TPU API documents, where the operator depends on it."""

import uuid
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import CLUSTER_ID, PLACE, make_resource
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, CloudTPUError
from stepkeeper_operator.queued_resources.request import build_request
from tpuapi.cloud import FakeCloud

ALPHA = ApiVersion.V2ALPHA1
ID = "team-v5e"


def request_of(cloud_id: str = ID, request_id: str = "", **node: Any) -> CloudRequest:
    """Make a request as the operator does, with changes to its node."""
    made = build_request(make_resource(), number=0, cluster_id=CLUSTER_ID, script=None)
    return replace(made, id=cloud_id, node_ids=(cloud_id,), request_id=request_id, node={**made.node, **node})


def state_of(cloud: FakeCloud) -> str:
    return cloud.resources[PLACE, ID].state


async def code_of(cloud: FakeCloud, request: CloudRequest) -> str:
    with pytest.raises(CloudTPUError) as refused:
        await cloud.create_queued_resource(request)
    return refused.value.code


@pytest.mark.parametrize(
    "request_",
    [
        request_of("a/b"),
        request_of(runtime_version="none"),
        request_of(accelerator_type="v9-8"),
        request_of(labels={"Team": "x"}),
        request_of(labels={"team": "x.y"}),
        request_of(tags=["-web"]),
        request_of(request_id="no UUID"),
        request_of(autocheckpoint_enabled=True),
        replace(request_of(), queueing={"valid_until_time": "2020-01-01T00:00:00Z"}),
    ],
)
async def test_what_the_documentation_forbids_is_refused(request_: CloudRequest) -> None:
    cloud = FakeCloud()
    assert await code_of(cloud, request_) == "INVALID_ARGUMENT"
    assert not cloud.resources


async def test_a_name_is_taken_once_and_a_request_id_is_remembered_for_its_request_alone() -> None:
    cloud, request_id = FakeCloud(), str(uuid.uuid4())
    asked = request_of(request_id=request_id)
    operation = await cloud.create_queued_resource(asked)
    assert await cloud.create_queued_resource(asked) == operation
    assert await code_of(cloud, request_of("other", request_id)) == "INVALID_ARGUMENT"
    assert await code_of(cloud, request_of()) == "ALREADY_EXISTS"
    cloud.step(3601)
    assert await code_of(cloud, asked) == "ALREADY_EXISTS"


async def test_states_pass_in_their_order_and_operations_end_with_what_they_are_about() -> None:
    cloud = FakeCloud()
    cloud.set_timings(accepted_s=5)
    cloud.set_capacity("v5litepod", 0)
    creation = await cloud.create_queued_resource(request_of())
    seen = [state_of(cloud)]
    for capacity in (0, 0, None, None):
        cloud.set_capacity("v5litepod", capacity)
        seen.append(state_of(cloud))
        cloud.step_to_next()
        seen.append(state_of(cloud))
    states = ["CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    assert list(dict.fromkeys(seen)) == states
    deletion = await cloud.delete_queued_resource(PLACE, ID, request_id="", version=ALPHA)
    assert deletion is not None
    running = await cloud.get_operation(deletion, ALPHA)
    cloud.step(10)
    assert not cloud.resources
    ended = [await cloud.get_operation(name, ALPHA) for name in (creation, deletion)]
    assert [each and each.done for each in (running, *ended)] == [False, True, True]


async def test_a_preempted_node_suspends_its_queued_resource_which_needs_quota_until_it_is_deleted() -> None:
    cloud = FakeCloud()
    cloud.set_quota("v5litepod", 16)
    await cloud.create_queued_resource(request_of())
    cloud.step(100)
    cloud.preempt(ID)
    assert (cloud.nodes[PLACE, ID].state, state_of(cloud)) == ("PREEMPTED", "ACTIVE")
    cloud.step(10)
    assert state_of(cloud) == "SUSPENDING"
    cloud.step(15)
    assert (state_of(cloud), cloud.resources[PLACE, ID].initiator) == ("SUSPENDED", "SERVICE")
    assert not cloud.nodes
    cloud.set_quota("v5litepod", 8)
    assert await code_of(cloud, request_of("next")) == "RESOURCE_EXHAUSTED"
    cloud.delete(ID)
    cloud.step(10)
    await cloud.create_queued_resource(request_of("next"))
