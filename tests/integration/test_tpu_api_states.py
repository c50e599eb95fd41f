"""The fake Cloud TPU API over time, asked by the real client over the network."""

from datetime import UTC, datetime, timedelta

import pytest
from google.api_core import exceptions

from tpuapi.clients import Clients, create_active, create_request, node, node_name, queued_name, state_of
from tpuapi.clock import START
from tpuapi.core.world import Habits, Timings
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


class TestAccepted:
    @pytest.fixture
    def tpu(self) -> FakeTpu:
        return FakeTpu(timings=Timings(accepted_s=30))

    async def test_a_service_may_accept_requests_before_they_wait(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        tpu.step(2)
        assert await state_of(clients, "qr") == "ACCEPTED"
        tpu.step(30)
        assert await state_of(clients, "qr") == "PROVISIONING"


async def test_each_state_has_the_data_of_its_name(tpu: FakeTpu, clients: Clients) -> None:
    """QueuedResourceState: "Further data for the … state"; there is none for WAITING_FOR_RESOURCES."""
    tpu.set_capacity(ZONE, "v5litepod", 0)
    await clients.alpha.create_queued_resource(request=create_request("qr"))

    async def data() -> object:
        state = (await clients.alpha.get_queued_resource(name=queued_name("qr"))).state
        which: str | None = type(state).pb(state).WhichOneof("state_data")
        return which

    assert await data() == "creating_data"
    tpu.step(5)
    assert await data() is None
    tpu.set_capacity(ZONE, "v5litepod", None)
    assert await data() == "provisioning_data"
    tpu.step(60)
    assert await data() == "active_data"


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


async def test_the_first_come_is_served_first_and_the_large_doesnt_block_the_small(
    tpu: FakeTpu, clients: Clients
) -> None:
    tpu.set_capacity(ZONE, "v5litepod", 0)
    for name, count in (("first", 2), ("large", 4), ("second", 0)):
        await clients.alpha.create_queued_resource(request=create_request(name, count=count))
        tpu.step(3)
    tpu.set_capacity(ZONE, "v5litepod", 8)
    assert [await state_of(clients, name) for name in ("first", "large", "second")] == [
        "PROVISIONING",
        "WAITING_FOR_RESOURCES",
        "WAITING_FOR_RESOURCES",
    ]
    tpu.set_capacity(ZONE, "v5litepod", 12)
    assert await state_of(clients, "second") == "PROVISIONING"
    assert await state_of(clients, "large") == "WAITING_FOR_RESOURCES"


async def test_a_ready_node_has_an_address_for_each_worker(tpu: FakeTpu, clients: Clients) -> None:

    await clients.alpha.create_queued_resource(
        request=create_request("qr", spec={"node": node(accelerator_type="v5litepod-16")})
    )
    tpu.step(3)
    assert not (await clients.alpha.get_node(name=node_name("qr"))).network_endpoints
    tpu.step(60)
    ready = await clients.alpha.get_node(name=node_name("qr"))
    assert len({endpoint.ip_address for endpoint in ready.network_endpoints}) == 4
    assert ready.health.name == "HEALTHY"


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


class TestLingering:
    @pytest.fixture
    def tpu(self) -> FakeTpu:
        return FakeTpu(habits=Habits(preempted_nodes_linger=True))

    async def test_a_preempted_node_may_stay_until_it_is_deleted(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        await create_active(tpu, clients, "qr", spot={})
        tpu.preempt("qr", state="TERMINATED")
        tpu.step(3600)
        assert await state_of(clients, "qr") == "SUSPENDED"
        assert (await clients.alpha.get_node(name=node_name("qr"))).state.name == "TERMINATED"
        await clients.alpha.delete_node(name=node_name("qr"))
        tpu.step(10)
        with pytest.raises(exceptions.NotFound):
            await clients.alpha.get_node(name=node_name("qr"))


async def test_who_deletes_a_node_suspends_its_queued_resource(tpu: FakeTpu, clients: Clients) -> None:
    """SUSPENDING: "The resources … are being deleted. This may have been initiated by the user"."""
    await create_active(tpu, clients, "qr", count=2)
    await clients.alpha.delete_node(name=node_name("qr-0"))
    resource = await clients.alpha.get_queued_resource(name=queued_name("qr"))
    assert (resource.state.state.name, resource.state.state_initiator.name) == ("SUSPENDING", "USER")
    tpu.step(15)
    assert await state_of(clients, "qr") == "SUSPENDED"
    with pytest.raises(exceptions.NotFound):
        await clients.alpha.get_node(name=node_name("qr-1"))


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


async def test_at_the_end_of_its_time_nothing_is_created_any_more(tpu: FakeTpu, clients: Clients) -> None:
    """valid_until_duration: "A relative time after which resources should not be created"."""
    policy = {"valid_until_duration": {"seconds": 2}}
    await clients.alpha.create_queued_resource(request=create_request("qr", queueing_policy=policy))
    tpu.step(2)
    assert await state_of(clients, "qr") == "FAILED"


async def test_a_request_in_time_doesnt_expire_any_more(tpu: FakeTpu, clients: Clients) -> None:
    policy = {"valid_until_duration": {"seconds": 10}}
    await create_active(tpu, clients, "qr", queueing_policy=policy)
    tpu.step(3600)
    assert await state_of(clients, "qr") == "ACTIVE"


@pytest.mark.parametrize(
    "policy",
    [
        {"valid_after_duration": {"seconds": 600}},
        {"valid_after_time": at_minute(10)},
        {"valid_interval": {"start_time": at_minute(10), "end_time": at_minute(20)}},
    ],
    ids=["duration", "time", "interval"],
)
async def test_a_request_waits_for_its_time(
    tpu: FakeTpu, clients: Clients, policy: dict[str, object]
) -> None:
    """QueueingPolicy: "A relative time after which resources may be created"."""
    await clients.alpha.create_queued_resource(request=create_request("qr", queueing_policy=policy))
    tpu.step(599)
    assert await state_of(clients, "qr") == "WAITING_FOR_RESOURCES"
    tpu.step(1)
    assert await state_of(clients, "qr") == "PROVISIONING"


@pytest.mark.parametrize("ending", ["ACTIVE", "SUSPENDED", "FAILED"])
async def test_a_reset_request_queues_again(tpu: FakeTpu, clients: Clients, ending: str) -> None:
    await create_active(tpu, clients, "qr")
    before = await clients.alpha.get_node(name=node_name("qr"))
    if ending == "SUSPENDED":
        tpu.preempt("qr")
        tpu.step(60)
    if ending == "FAILED":
        tpu.fail("qr")
    tpu.set_capacity(ZONE, "v5litepod", 0)
    operation = await clients.alpha.reset_queued_resource(name=queued_name("qr"))
    assert (await operation.result(timeout=5)).state.state.name == "WAITING_FOR_RESOURCES"
    tpu.set_capacity(ZONE, "v5litepod", None)
    tpu.step(60)
    assert await state_of(clients, "qr") == "ACTIVE"
    assert (await clients.alpha.get_node(name=node_name("qr"))).id != before.id


async def test_a_waiting_request_cant_be_reset(tpu: FakeTpu, clients: Clients) -> None:
    tpu.set_capacity(ZONE, "v5litepod", 0)
    await clients.alpha.create_queued_resource(request=create_request("qr"))
    tpu.step(5)
    with pytest.raises(exceptions.FailedPrecondition, match="can't be reset"):
        await clients.alpha.reset_queued_resource(name=queued_name("qr"))
