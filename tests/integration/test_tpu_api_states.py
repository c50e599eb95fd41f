"""The fake Cloud TPU API over time, asked by the real client over the network."""

from datetime import UTC, datetime, timedelta

import pytest
from google.api_core import exceptions

from tpuapi.clients import Clients, create_active, create_request, node_name, queued_name, state_of
from tpuapi.clock import START
from tpuapi.fake import FakeTpu

ZONE = "us-west4-a"


def at_minute(minute: int) -> datetime:
    """Return a time after the start of the service's clock."""
    return datetime.fromtimestamp(START, UTC) + timedelta(minutes=minute)


async def test_a_request_waits_is_provisioned_and_is_active(tpu: FakeTpu, clients: Clients) -> None:
    tpu.set_capacity(ZONE, "v5litepod-4", 0)
    await clients.alpha.create_queued_resource(request=create_request("qr"))
    seen = [await state_of(clients, "qr")]
    tpu.step(5)
    seen.append(await state_of(clients, "qr"))
    tpu.step(24 * 3600)
    seen.append(await state_of(clients, "qr"))
    tpu.set_capacity(ZONE, "v5litepod-4", 4)
    seen.append(await state_of(clients, "qr"))
    assert (await clients.alpha.get_node(name=node_name("qr"))).state.name == "CREATING"
    tpu.step(60)
    seen.append(await state_of(clients, "qr"))
    assert seen == ["CREATING", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


async def test_nodes_of_several_are_numbered_and_ready_one_after_the_other(
    tpu: FakeTpu, clients: Clients
) -> None:
    """MultiNodeParams: "If this field is not provided we use queued_resource_id as the node_id_prefix"."""
    await clients.alpha.create_queued_resource(request=create_request("qr", count=3))
    tpu.step(2 + 60 + 2)
    nodes = [n async for n in await clients.alpha.list_nodes(parent=create_request("qr")["parent"])]
    assert [(n.name.rpartition("/")[2], n.state.name) for n in nodes] == [
        ("qr-0", "READY"),
        ("qr-1", "READY"),
        ("qr-2", "CREATING"),
    ]
    assert await state_of(clients, "qr") == "PROVISIONING"
    tpu.step(2)
    assert await state_of(clients, "qr") == "ACTIVE"
    assert all(n.multislice_node and n.queued_resource == queued_name("qr") for n in nodes)


async def test_a_preempted_node_suspends_its_queued_resource(tpu: FakeTpu, clients: Clients) -> None:
    """state_initiator: "whether the SUSPENDING/SUSPENDED state was initiated by the user or the service"."""
    await create_active(tpu, clients, "qr", count=2, spot={})
    tpu.preempt("qr-1")
    assert (await clients.alpha.get_node(name=node_name("qr-1"))).state.name == "PREEMPTED"
    assert await state_of(clients, "qr") == "ACTIVE"
    tpu.step(10)
    assert await state_of(clients, "qr") == "SUSPENDING"
    assert (await clients.alpha.get_node(name=node_name("qr-0"))).state.name == "DELETING"
    tpu.step(15)
    resource = await clients.alpha.get_queued_resource(name=queued_name("qr"))
    assert (resource.state.state.name, resource.state.state_initiator.name) == ("SUSPENDED", "SERVICE")
    with pytest.raises(exceptions.NotFound):
        await clients.alpha.get_node(name=node_name("qr-1"))
    tpu.step(7 * 24 * 3600)
    assert await state_of(clients, "qr") == "SUSPENDED"


async def test_a_failed_request_says_why_and_stays(tpu: FakeTpu, clients: Clients) -> None:
    """FailedData: "The error that caused the queued resource to enter the FAILED state"."""
    await create_active(tpu, clients, "qr")
    tpu.fail("qr", "INTERNAL", "a host is broken")
    for client in (clients.alpha, clients.v2):
        state = (await client.get_queued_resource(name=queued_name("qr"))).state
        assert state.state.name == "FAILED"
        assert (state.failed_data.error.code, state.failed_data.error.message) == (13, "a host is broken")
    tpu.step(7 * 24 * 3600)
    assert await state_of(clients, "qr") == "FAILED"
    with pytest.raises(exceptions.NotFound):
        await clients.alpha.get_node(name=node_name("qr"))


@pytest.mark.parametrize(
    "policy",
    [{"valid_until_duration": {"seconds": 600}}, {"valid_until_time": at_minute(10)}],
    ids=["duration", "time"],
)
async def test_a_request_expires_and_stays_until_it_is_deleted(
    tpu: FakeTpu, clients: Clients, policy: dict[str, object]
) -> None:
    """QueueingPolicy: "If the request cannot be fulfilled by this time the request will be failed"."""
    tpu.set_capacity(ZONE, "v5litepod", 0)
    await clients.alpha.create_queued_resource(request=create_request("qr", queueing_policy=policy))
    tpu.step(599)
    assert await state_of(clients, "qr") == "WAITING_FOR_RESOURCES"
    tpu.step(1)
    state = (await clients.alpha.get_queued_resource(name=queued_name("qr"))).state
    assert state.state.name == "FAILED"
    assert "valid until" in state.failed_data.error.message
    tpu.set_capacity(ZONE, "v5litepod", None)
    tpu.step(7 * 24 * 3600)
    assert await state_of(clients, "qr") == "FAILED"
    await clients.alpha.delete_queued_resource(name=queued_name("qr"))
