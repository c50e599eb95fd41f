"""Quotas of the fake Cloud TPU API: what eats them, how they are refused, when they are free again."""

import pytest
from google.api_core import exceptions
from google.rpc import error_details_pb2

from tpuapi.clients import (
    PARENT,
    PROJECT,
    ZONE,
    Clients,
    create_active,
    create_request,
    node,
    queued_name,
    state_of,
)
from tpuapi.core.world import Habits
from tpuapi.fake import FakeTpu

LIMIT = "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI"


async def test_a_request_beyond_the_quota_is_refused_with_all_details(tpu: FakeTpu, clients: Clients) -> None:
    tpu.set_quota(PROJECT, ZONE, "v5litepod", 4, preemptible=True)
    with pytest.raises(exceptions.ResourceExhausted) as caught:
        await clients.alpha.create_queued_resource(request=create_request("qr", count=2, spot={}))
    error = caught.value
    assert error.code == 429
    assert error.message == f"Quota limit '{LIMIT}' has been exceeded. Limit: 4 in zone {ZONE}."
    assert (error.reason, error.metadata["quota_limit"]) == ("RESOURCE_QUOTA_EXCEEDED", LIMIT)
    failures = [each for each in error.details if isinstance(each, error_details_pb2.QuotaFailure)]
    violation = failures[0].violations[0]
    assert (violation.subject, violation.quota_value) == (f"project:{PROJECT}", 4)
    assert dict(violation.quota_dimensions) == {"zone": ZONE}
    assert not tpu.engine.world.queued


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "SUSPENDED", "FAILED"])
async def test_a_request_eats_quota_until_it_is_deleted(tpu: FakeTpu, clients: Clients, state: str) -> None:
    tpu.set_quota(PROJECT, ZONE, "v5litepod", 4)
    if state == "WAITING_FOR_RESOURCES":
        tpu.set_capacity(ZONE, "v5litepod", 0)
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        tpu.step(5)
    else:
        await create_active(tpu, clients, "qr")
    if state == "FAILED":
        tpu.fail("qr")
    if state == "SUSPENDED":
        tpu.preempt("qr")
        tpu.step(3600)
    assert await state_of(clients, "qr") == state
    with pytest.raises(exceptions.ResourceExhausted):
        await clients.alpha.create_queued_resource(request=create_request("next"))
    await clients.alpha.delete_queued_resource(name=queued_name("qr"))
    with pytest.raises(exceptions.ResourceExhausted):
        await clients.alpha.create_queued_resource(request=create_request("next"))
    tpu.step(10)
    await clients.alpha.create_queued_resource(request=create_request("next"))


async def test_quotas_are_of_a_project_a_zone_a_family_and_a_way_of_provisioning(
    tpu: FakeTpu, clients: Clients
) -> None:
    tpu.set_quota(PROJECT, ZONE, "v5litepod", 0)
    others = {
        "spot": create_request("spot", spot={}),
        "zone": create_request("zone", parent=f"projects/{PROJECT}/locations/us-west4-b"),
        "project": create_request("project", parent=f"projects/b-project/locations/{ZONE}"),
        "family": create_request("family", spec={"node": node(accelerator_type="v6e-4")}),
    }
    for request in others.values():
        await clients.alpha.create_queued_resource(request=request)
    with pytest.raises(exceptions.ResourceExhausted):
        await clients.v2.create_queued_resource(request=create_request("qr"))


async def test_a_quota_can_be_raised(tpu: FakeTpu, clients: Clients) -> None:
    tpu.set_quota(PROJECT, ZONE, "v5litepod", 0)
    with pytest.raises(exceptions.ResourceExhausted):
        await clients.alpha.create_queued_resource(request=create_request("qr"))
    tpu.set_quota(PROJECT, ZONE, "v5litepod", None)
    await clients.alpha.create_queued_resource(request=create_request("qr"))


async def test_a_node_needs_quota_and_room_too(tpu: FakeTpu, clients: Clients) -> None:
    tpu.set_quota(PROJECT, ZONE, "v5litepod", 0)
    with pytest.raises(exceptions.ResourceExhausted, match="Quota limit"):
        await clients.v2.create_node(parent=PARENT, node_id="n", node=node())
    tpu.set_quota(PROJECT, ZONE, "v5litepod", None)
    tpu.set_capacity(ZONE, "v5litepod", 0)
    with pytest.raises(exceptions.ResourceExhausted, match="no more capacity"):
        await clients.v2.create_node(parent=PARENT, node_id="n", node=node())


async def test_a_quota_error_can_be_injected(tpu: FakeTpu, clients: Clients) -> None:
    tpu.inject_quota_error("CreateQueuedResource", ZONE, "v5litepod", 16)
    with pytest.raises(exceptions.ResourceExhausted, match="Limit: 16"):
        await clients.alpha.create_queued_resource(request=create_request("qr"))


class TestLate:
    @pytest.fixture
    def tpu(self) -> FakeTpu:
        return FakeTpu(habits=Habits(quota_refused_at_call=False))

    async def test_a_request_beyond_the_quota_may_fail_later(self, tpu: FakeTpu, clients: Clients) -> None:
        tpu.set_quota(PROJECT, ZONE, "v5litepod", 4)
        await create_active(tpu, clients, "first")
        operation = await clients.alpha.create_queued_resource(request=create_request("second"))
        tpu.step(2)
        with pytest.raises(exceptions.GoogleAPICallError, match="Quota limit"):
            await operation.result(timeout=60)
        state = (await clients.alpha.get_queued_resource(name=queued_name("second"))).state
        assert (state.state.name, state.failed_data.error.code) == ("FAILED", 8)
        assert state.failed_data.error.details[1].Is(error_details_pb2.QuotaFailure.DESCRIPTOR)
