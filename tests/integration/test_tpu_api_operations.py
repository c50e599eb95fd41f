"""Long-running operations of the fake Cloud TPU API, requests that are made again, and answers that are lost."""

import asyncio
import uuid

import pytest
from google.api_core import exceptions
from google.longrunning import operations_pb2

from tpuapi.clients import (
    PARENT,
    Clients,
    connected,
    create_active,
    create_request,
    node_name,
    queued_name,
    state_of,
)
from tpuapi.core.world import Timings
from tpuapi.fake import FakeTpu
from tpuapi.server import serving

FIRST = str(uuid.UUID(int=1))
SECOND = str(uuid.UUID(int=2))


async def test_an_operation_says_what_it_does(tpu: FakeTpu, clients: Clients) -> None:
    operation = await clients.alpha.create_queued_resource(request=create_request("qr"))
    metadata = operation.metadata
    assert (metadata.verb, metadata.target, metadata.api_version) == ("create", queued_name("qr"), "v2alpha1")
    assert operation.operation.name.startswith(f"{PARENT}/operations/operation-")
    assert not await operation.done()
    tpu.step(2)
    assert (await operation.result(timeout=60)).state.state.name == "WAITING_FOR_RESOURCES"
    assert (operation.metadata.end_time - operation.metadata.create_time).total_seconds() == 2


async def test_a_client_that_was_restarted_follows_an_operation_by_its_name() -> None:
    tpu = FakeTpu()
    async with serving(tpu) as address:
        async with connected(address) as clients:
            operation = await clients.v2.create_queued_resource(request=create_request("qr"))
        async with connected(address) as clients:
            name = operation.operation.name
            found = await clients.v2.get_operation(operations_pb2.GetOperationRequest(name=name))
            assert not found.done
            tpu.step(5)
            found = await clients.v2.get_operation(operations_pb2.GetOperationRequest(name=name))
            assert found.done
            assert found.response.TypeName() == "google.cloud.tpu.v2.QueuedResource"
            assert found.metadata.TypeName() == "google.cloud.tpu.v2.OperationMetadata"


async def test_a_service_that_was_away_knows_its_operations() -> None:
    tpu = FakeTpu()
    async with serving(tpu) as address, connected(address) as clients:
        operation = await clients.v2.create_queued_resource(request=create_request("qr"))
    host, _, port = address.rpartition(":")
    async with connected(address) as clients:
        with pytest.raises(exceptions.ServiceUnavailable):
            await clients.v2.get_queued_resource(name=queued_name("qr"))
    tpu.step(5)
    async with serving(tpu, host, int(port)) as address, connected(address) as clients:
        name = operation.operation.name
        found = await clients.v2.get_operation(operations_pb2.GetOperationRequest(name=name))
        assert found.done


async def test_an_operation_ends_with_the_error_of_its_target(tpu: FakeTpu, clients: Clients) -> None:
    operation = await clients.alpha.create_queued_resource(request=create_request("qr"))
    tpu.fail("qr", "INTERNAL", "a host is broken")
    with pytest.raises(exceptions.GoogleAPICallError, match="a host is broken"):
        await operation.result(timeout=60)


async def test_a_deletion_that_fails_leaves_all_as_it_was_and_answers_the_same_request_again(
    tpu: FakeTpu, clients: Clients
) -> None:
    await create_active(tpu, clients, "qr")
    tpu.fail_deletions("INTERNAL", message="a host is broken")
    request = {"name": queued_name("qr"), "force": True, "request_id": FIRST}
    operation = await clients.alpha.delete_queued_resource(request=request)
    assert not await operation.done()
    tpu.step(10)
    with pytest.raises(exceptions.GoogleAPICallError, match="a host is broken"):
        await operation.result(timeout=60)
    again = await clients.alpha.delete_queued_resource(request=request)
    assert again.operation.name == operation.operation.name
    assert await state_of(clients, "qr") == "ACTIVE"
    await clients.alpha.delete_queued_resource(request=request | {"request_id": SECOND})
    assert await state_of(clients, "qr") == "DELETING"


async def test_an_operation_on_what_is_deleted_is_aborted(tpu: FakeTpu, clients: Clients) -> None:
    creation = await clients.alpha.create_queued_resource(request=create_request("qr"))
    deletion = await clients.alpha.delete_queued_resource(request={"name": queued_name("qr"), "force": True})
    tpu.step(10)
    assert (await deletion.result(timeout=60)).name == queued_name("qr")
    with pytest.raises(exceptions.GoogleAPICallError, match="deleted meanwhile"):
        await creation.result(timeout=60)


async def test_an_operation_on_a_node_ends_with_the_node(tpu: FakeTpu, clients: Clients) -> None:
    await create_active(tpu, clients, "qr")
    simulation = await clients.alpha.simulate_maintenance_event(request={"name": node_name("qr")})
    await clients.alpha.delete_queued_resource(request={"name": queued_name("qr"), "force": True})
    tpu.step(10)
    with pytest.raises(exceptions.GoogleAPICallError, match="deleted meanwhile"):
        await simulation.result(timeout=60)


async def test_an_operation_can_be_listed_cancelled_and_forgotten(tpu: FakeTpu, clients: Clients) -> None:
    operation = await clients.alpha.create_queued_resource(request=create_request("qr"))
    name = operation.operation.name
    await clients.alpha.cancel_operation(operations_pb2.CancelOperationRequest(name=name))
    listed = await clients.alpha.list_operations(operations_pb2.ListOperationsRequest(name=PARENT))
    assert [each.name for each in listed.operations] == [name]
    tpu.step(2)
    await operation.result(timeout=60)
    assert operation.metadata.cancel_requested
    await clients.alpha.delete_operation(operations_pb2.DeleteOperationRequest(name=name))
    with pytest.raises(exceptions.NotFound):
        await clients.alpha.get_operation(operations_pb2.GetOperationRequest(name=name))


async def test_old_operations_are_forgotten() -> None:
    tpu = FakeTpu(timings=Timings(operation_memory_s=100))
    async with serving(tpu) as address, connected(address) as clients:
        operation = await clients.alpha.create_queued_resource(request=create_request("qr"))
        tpu.step(103)
        with pytest.raises(exceptions.NotFound):
            await operation.done()


class TestRequestIds:
    """CreateQueuedResourceRequest.request_id: "Idempotent request UUID"."""

    async def test_the_same_request_is_carried_out_once(self, tpu: FakeTpu, clients: Clients) -> None:
        request = create_request("qr", request_id=FIRST)
        one = await clients.alpha.create_queued_resource(request=request)
        tpu.step(100)
        two = await clients.alpha.create_queued_resource(request=request)
        assert one.operation.name == two.operation.name
        assert await two.done()
        assert await state_of(clients, "qr") == "ACTIVE"

    async def test_another_id_is_another_request(self, clients: Clients) -> None:
        await clients.alpha.create_queued_resource(request=create_request("qr", request_id=FIRST))
        with pytest.raises(exceptions.AlreadyExists):
            await clients.alpha.create_queued_resource(request=create_request("qr", request_id=SECOND))

    async def test_an_id_is_of_one_request(self, clients: Clients) -> None:
        await clients.alpha.create_queued_resource(request=create_request("qr", request_id=FIRST))
        with pytest.raises(exceptions.InvalidArgument, match="differs"):
            await clients.alpha.create_queued_resource(
                request=create_request("qr", count=2, request_id=FIRST)
            )

    async def test_a_refused_request_can_be_made_again(self, tpu: FakeTpu, clients: Clients) -> None:
        tpu.set_quota("a-project", "us-west4-a", "v5litepod", 0)
        request = create_request("qr", request_id=FIRST)
        with pytest.raises(exceptions.ResourceExhausted):
            await clients.alpha.create_queued_resource(request=request)
        tpu.set_quota("a-project", "us-west4-a", "v5litepod", 4)
        await clients.alpha.create_queued_resource(request=request)

    async def test_an_id_is_remembered_longer_than_what_it_created(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        """Who creates again under the id of the first time gets the first time's operation, and nothing is created."""
        request = create_request("qr", request_id=FIRST)
        first = await clients.alpha.create_queued_resource(request=request)
        await clients.alpha.delete_queued_resource(request={"name": queued_name("qr"), "force": True})
        tpu.step(10)
        again = await clients.alpha.create_queued_resource(request=request)
        assert again.operation.name == first.operation.name
        with pytest.raises(exceptions.NotFound):
            await state_of(clients, "qr")
        tpu.step(3600)
        assert (
            await clients.alpha.create_queued_resource(request=request)
        ).operation.name != first.operation.name
        assert await state_of(clients, "qr") == "CREATING"

    async def test_deletions_have_them_too(self, tpu: FakeTpu, clients: Clients) -> None:
        await create_active(tpu, clients, "qr")
        request = {"name": queued_name("qr"), "force": True, "request_id": FIRST}
        one = await clients.alpha.delete_queued_resource(request=request)
        tpu.step(20)
        two = await clients.alpha.delete_queued_resource(request=request)
        assert one.operation.name == two.operation.name
        await two.result(timeout=60)

    async def test_deletions_of_nodes_in_v2alpha1_have_them_too(self, tpu: FakeTpu, clients: Clients) -> None:
        await create_active(tpu, clients, "qr")
        request = {"name": node_name("qr"), "request_id": FIRST}
        one = await clients.alpha.delete_node(request=request)
        two = await clients.alpha.delete_node(request=request)
        assert one.operation.name == two.operation.name


class TestFaults:
    async def test_an_answer_is_lost_though_the_call_was_carried_out(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        request = create_request("qr", request_id=FIRST)
        tpu.inject_error("CreateQueuedResource", "UNAVAILABLE", after_commit=True)
        with pytest.raises(exceptions.ServiceUnavailable):
            await clients.alpha.create_queued_resource(request=request)
        assert await state_of(clients, "qr") == "CREATING"
        tpu.step(2)
        again = await clients.alpha.create_queued_resource(request=request)
        assert (await again.result(timeout=60)).name == queued_name("qr")
        assert tpu.count("CreateQueuedResource") == 2

    async def test_a_call_fails_and_nothing_is_done(self, tpu: FakeTpu, clients: Clients) -> None:
        tpu.inject_error(
            "CreateQueuedResource", "PERMISSION_DENIED", 2, message="no tpu.nodes.create", reason="IAM"
        )
        for _ in range(2):
            with pytest.raises(exceptions.PermissionDenied, match=r"no tpu\.nodes\.create") as caught:
                await clients.alpha.create_queued_resource(request=create_request("qr"))
            assert caught.value.reason == "IAM"
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        assert [call.code for call in tpu.calls] == ["PERMISSION_DENIED", "PERMISSION_DENIED", "OK"]

    async def test_faults_can_be_of_one_resource(self, tpu: FakeTpu, clients: Clients) -> None:
        tpu.inject_error("*", "INTERNAL", None, resource="queuedResources/bad")
        await clients.alpha.create_queued_resource(request=create_request("good"))
        with pytest.raises(exceptions.InternalServerError):
            await clients.alpha.create_queued_resource(request=create_request("bad"))
        with pytest.raises(exceptions.InternalServerError):
            await clients.alpha.get_queued_resource(name=queued_name("bad"))
        tpu.clear_faults()
        await clients.alpha.create_queued_resource(request=create_request("bad"))

    async def test_a_held_call_is_answered_once_it_is_released(self, tpu: FakeTpu, clients: Clients) -> None:
        tpu.hold("CreateQueuedResource")
        call = asyncio.ensure_future(clients.alpha.create_queued_resource(request=create_request("qr")))
        await tpu.until_held("CreateQueuedResource")
        assert not tpu.engine.world.queued
        tpu.release("CreateQueuedResource")
        assert (await call).metadata.target == queued_name("qr")

    async def test_an_answer_is_held_while_what_was_asked_for_goes_on(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        tpu.hold("CreateQueuedResource", after_commit=True)
        call = asyncio.ensure_future(clients.alpha.create_queued_resource(request=create_request("qr")))
        await tpu.until_held("CreateQueuedResource")
        assert list(tpu.engine.world.queued) == [queued_name("qr")]
        assert [logged.code for logged in tpu.calls] == [""]
        assert not call.done()
        tpu.release("CreateQueuedResource")
        assert (await call).metadata.target == queued_name("qr")

    async def test_a_call_takes_longer_than_its_deadline(self, tpu: FakeTpu, clients: Clients) -> None:
        tpu.inject_latency("GetQueuedResource", 30)
        with pytest.raises(exceptions.DeadlineExceeded):
            await clients.alpha.get_queued_resource(name=queued_name("qr"), timeout=0.05)
        with pytest.raises(exceptions.NotFound):
            await clients.alpha.get_queued_resource(name=queued_name("qr"), timeout=10)
