"""The fake Cloud TPU API refuses what the documentation of the API's messages forbids; each rule is quoted."""

from typing import Any

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
    node_name,
    queued_name,
    state_of,
)
from tpuapi.core.errors import DOMAIN
from tpuapi.fake import FakeTpu

NODE = "queued_resource.tpu.node_spec[0].node"
SPEC = "queued_resource.tpu.node_spec[0]"
DISK = "projects/p/zones/z/disks/d"
POLICY = "queued_resource.queueing_policy"


def with_node(**fields: Any) -> dict[str, Any]:
    return create_request("qr", spec={"node": node(**fields)})


REFUSED = {
    "parent: Required": ("parent", create_request("qr", parent="") | {"parent": ""}),
    "parent: of the form projects/*/locations/*": ("parent", create_request("qr", parent="projects/p")),
    "queued_resource_id: should follow ^[A-Za-z0-9_.~+%-]+$": ("queued_resource_id", create_request("a/b")),
    "queued_resource: Required": (
        "queued_resource",
        {"parent": PARENT, "queued_resource_id": "qr"},
    ),
    "tpu.node_spec: the nodes being requested": (
        "queued_resource.tpu.node_spec",
        {"parent": PARENT, "queued_resource_id": "qr", "queued_resource": {"tpu": {}}},
    ),
    "request_id: UUID": ("request_id", create_request("qr", request_id="first")),
    "node_spec.parent: Required": (f"{SPEC}.parent", create_request("qr", spec={"parent": ""})),
    "node_spec.node: Required": (
        f"{SPEC}.node",
        {
            "parent": PARENT,
            "queued_resource_id": "qr",
            "queued_resource": {"tpu": {"node_spec": [{"parent": PARENT, "node_id": "qr"}]}},
        },
    ),
    "node_id: should follow the regex": (f"{SPEC}.node_id", create_request("qr", node_id="a b")),
    "it's an error to specify both node_id and multi_node_params": (
        f"{SPEC}.multi_node_params",
        create_request("qr", count=2, spec={"node_id": "qr"}),
    ),
    "node_count: needs to be > 1": (f"{SPEC}.multi_node_params.node_count", create_request("qr", count=1)),
    "node_id_prefix: should follow the regex": (
        f"{SPEC}.multi_node_params.node_id_prefix",
        create_request("qr", count=2, spec={"multi_node_params": {"node_count": 2, "node_id_prefix": "a b"}}),
    ),
    "runtime_version: Required": (f"{NODE}.runtime_version", with_node(runtime_version=None)),
    "runtime_version: one that ListRuntimeVersions lists": (
        f"{NODE}.runtime_version",
        with_node(runtime_version="tpu-vm-1"),
    ),
    "description: maximum of 512 characters": (f"{NODE}.description", with_node(description="x" * 513)),
    "an accelerator is needed": (f"{NODE}.accelerator_type", with_node(accelerator_type=None)),
    "one accelerator is enough": (
        f"{NODE}.accelerator_config",
        with_node(accelerator_config={"type_": "V5LITE_POD", "topology": "2x2"}),
    ),
    "an accelerator of the Cloud TPU API: v7x is GKE's": (
        f"{NODE}.accelerator_type",
        with_node(accelerator_type="tpu7x-8"),
    ),
    "accelerator_config.topology: Required": (
        f"{NODE}.accelerator_config.topology",
        with_node(accelerator_type=None, accelerator_config={"type_": "V5P"}),
    ),
    "accelerator_config.type: Required": (
        f"{NODE}.accelerator_config.type",
        with_node(accelerator_type=None, accelerator_config={"topology": "2x2"}),
    ),
    "topology in chips, of the type": (
        f"{NODE}.accelerator_config.topology",
        with_node(accelerator_type=None, accelerator_config={"type_": "V5LITE_POD", "topology": "2x2x1"}),
    ),
    "network_config and network_configs are mutually exclusive": (
        f"{NODE}.network_configs",
        with_node(network_config={"network": "a"}, network_configs=[{"network": "b"}]),
    ),
    "cidr_block: must be a /29 block": (f"{NODE}.cidr_block", with_node(cidr_block="10.0.0.0/28")),
    "labels: keys start with a lower-case letter": (f"{NODE}.labels", with_node(labels={"Team": "a"})),
    "labels: values have no slash": (f"{NODE}.labels", with_node(labels={"job": "a/b"})),
    "labels: at most 64": (f"{NODE}.labels", with_node(labels={f"k{n}": "" for n in range(65)})),
    "metadata: at most 256 KiB a value": (
        f"{NODE}.metadata",
        with_node(metadata={"startup-script": "x" * (256 * 1024 + 1)}),
    ),
    "tags: RFC 1035": (f"{NODE}.tags", with_node(tags=["A"])),
    "source_disk: the full path to an existing disk": (
        f"{NODE}.data_disks[0].source_disk",
        with_node(data_disks=[{"source_disk": "disk"}]),
    ),
    "READ_WRITE: only one TPU node can attach a disk in read-write mode at a time": (
        f"{NODE}.data_disks[0].mode",
        create_request("qr", count=2, spec={"node": node(data_disks=[{"source_disk": DISK}])}),
    ),
    "reservation_name: Format: projects/{project}/locations/{zone}/reservations/{reservation}": (
        "queued_resource.reservation_name",
        create_request("qr", reservation_name="mine"),
    ),
    "valid_until_time in the past": (
        POLICY,
        create_request("qr", queueing_policy={"valid_until_time": "2025-12-31T00:00:00Z"}),
    ),
    "valid_until_duration of nothing": (
        f"{POLICY}.valid_until_duration",
        create_request("qr", queueing_policy={"valid_until_duration": {"seconds": -1}}),
    ),
}


@pytest.mark.parametrize(("field", "request_"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_request_that_breaks_a_rule_is_an_invalid_argument(
    tpu: FakeTpu, clients: Clients, field: str, request_: dict[str, Any]
) -> None:
    with pytest.raises(exceptions.InvalidArgument) as caught:
        await clients.alpha.create_queued_resource(request=request_)
    details = [each for each in caught.value.details if isinstance(each, error_details_pb2.BadRequest)]
    assert [violation.field for violation in details[0].field_violations] == [field]
    assert caught.value.domain == DOMAIN
    assert not tpu.engine.world.queued
    assert not tpu.engine.world.operations


async def test_both_versions_have_the_rules(clients: Clients) -> None:
    request = create_request("qr", spec={"node": node(runtime_version=None)})
    with pytest.raises(exceptions.InvalidArgument, match="runtime version is required"):
        await clients.v2.create_queued_resource(request=request)


async def test_node_specs_are_of_the_parent(clients: Clients) -> None:
    other = {"parent": f"projects/{PROJECT}/locations/us-west4-b"}
    with pytest.raises(exceptions.InvalidArgument, match="is not the queued resource's"):
        await clients.alpha.create_queued_resource(request=create_request("qr", spec=other))


async def test_what_is_output_only_is_ignored(clients: Clients) -> None:
    """Node.name, state, id and others, QueuedResource.name, create_time, state: "Output only"."""
    request = create_request(
        "qr",
        spec={"node": node(name="x", state="PREEMPTED", id=7, queued_resource="x", health_description="x")},
        name="x",
        state={"state": "FAILED"},
        create_time="2020-01-01T00:00:00Z",
    )
    await clients.alpha.create_queued_resource(request=request)
    resource = await clients.alpha.get_queued_resource(name=queued_name("qr"))
    assert (resource.name, resource.state.state.name) == (queued_name("qr"), "CREATING")
    assert resource.create_time.year == 2026
    body = resource.tpu.node_spec[0].node
    assert (body.name, body.state, body.id, body.queued_resource, body.health_description) == (
        "",
        0,
        0,
        "",
        "",
    )


async def test_a_name_is_used_once(clients: Clients) -> None:
    await clients.alpha.create_queued_resource(request=create_request("qr"))
    with pytest.raises(exceptions.AlreadyExists) as caught:
        await clients.v2.create_queued_resource(request=create_request("qr"))
    assert caught.value.reason == "RESOURCE_EXISTS"


async def test_a_nodes_name_is_used_once(clients: Clients) -> None:
    await clients.alpha.create_queued_resource(request=create_request("one", node_id="tpu-0"))
    request = create_request(
        "two", spec={"node_id": "", "multi_node_params": {"node_count": 2, "node_id_prefix": "tpu"}}
    )
    with pytest.raises(exceptions.AlreadyExists, match="tpu-0"):
        await clients.alpha.create_queued_resource(request=request)


async def test_a_cidr_block_is_used_once(tpu: FakeTpu, clients: Clients) -> None:
    """cidr_block: "Errors will occur if the CIDR block has already been used for a currently existing TPU node"."""
    block = {"node": node(cidr_block="10.0.0.0/29")}
    await create_active(tpu, clients, "one", spec=block)
    with pytest.raises(exceptions.InvalidArgument, match="already used"):
        await clients.alpha.create_queued_resource(request=create_request("two", spec=block))


async def test_a_disk_is_shared_for_reading_only(tpu: FakeTpu, clients: Clients) -> None:
    """READ_ONLY: "Multiple TPU nodes can attach a disk in read-only mode at a time"."""
    shared = {"node": node(data_disks=[{"source_disk": DISK, "mode": "READ_ONLY"}])}
    await create_active(tpu, clients, "many", count=2, spec=shared)
    await create_active(tpu, clients, "more", spec=shared)
    writing = {"node": node(data_disks=[{"source_disk": DISK}])}
    with pytest.raises(exceptions.InvalidArgument, match="only one TPU node"):
        await clients.alpha.create_queued_resource(request=create_request("qr", spec=writing))


async def test_a_reservation_that_is_not_there_is_not_found(tpu: FakeTpu, clients: Clients) -> None:
    reservation = f"{PARENT}/reservations/mine"
    request = create_request("qr", reservation_name=reservation, guaranteed={"reserved": True})
    with pytest.raises(exceptions.NotFound, match="reservations/mine"):
        await clients.alpha.create_queued_resource(request=request)
    assert tpu.add_reservation(PROJECT, ZONE, "mine", "v5litepod", 16) == reservation
    await clients.alpha.create_queued_resource(request=request)
    listed = [each async for each in await clients.alpha.list_reservations(request={"parent": PARENT})]
    assert [(each.name, each.state.name, each.standard.size) for each in listed] == [
        (reservation, "ACTIVE", 16)
    ]


@pytest.mark.parametrize("method", ["get_queued_resource", "delete_queued_resource", "reset_queued_resource"])
async def test_what_is_not_there_is_not_found(clients: Clients, method: str) -> None:
    for client in (clients.alpha, clients.v2):
        with pytest.raises(exceptions.NotFound):
            await getattr(client, method)(name=queued_name("qr"))
        with pytest.raises(exceptions.InvalidArgument):
            await getattr(client, method)(name="qr")


class TestDeletion:
    """DeleteQueuedResource: "Otherwise (i.e. force=false), the queued resource will only be deleted if its nodes have
    already been deleted or the queued resource is in the ACCEPTED, FAILED, or SUSPENDED state"."""

    async def test_it_is_refused_without_force_while_there_are_nodes(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        refused = []
        for _ in range(3):
            with pytest.raises(exceptions.FailedPrecondition, match="without force") as caught:
                await clients.alpha.delete_queued_resource(name=queued_name("qr"))
            assert caught.value.reason == "FORCE_REQUIRED"
            refused.append(await state_of(clients, "qr"))
            tpu.step_to_next()
        assert refused == ["CREATING", "PROVISIONING", "ACTIVE"]

    async def test_it_is_refused_while_nodes_are_being_deleted(self, tpu: FakeTpu, clients: Clients) -> None:
        await create_active(tpu, clients, "qr")
        await clients.alpha.delete_node(name=node_name("qr"))
        assert await state_of(clients, "qr") == "SUSPENDING"
        with pytest.raises(exceptions.FailedPrecondition, match="SUSPENDING"):
            await clients.alpha.delete_queued_resource(name=queued_name("qr"))

    @pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"])
    async def test_it_needs_no_force_where_there_are_no_nodes(
        self, tpu: FakeTpu, clients: Clients, state: str
    ) -> None:
        tpu.set_capacity(ZONE, "v5litepod", 0 if state == "WAITING_FOR_RESOURCES" else None)
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        tpu.step(100)
        if state == "FAILED":
            tpu.fail("qr")
        if state == "SUSPENDED":
            tpu.preempt("qr")
            tpu.step(100)
        assert await state_of(clients, "qr") == state
        await clients.alpha.delete_queued_resource(name=queued_name("qr"))
        tpu.step(10)
        with pytest.raises(exceptions.NotFound):
            await state_of(clients, "qr")

    async def test_with_force_nodes_go_first_in_every_state(self, tpu: FakeTpu, clients: Clients) -> None:
        """ "If set to true, all running nodes belonging to this queued resource will be deleted first"."""
        seen = []
        for n_steps in range(6):
            await clients.v2.create_queued_resource(request=create_request("qr"))
            for step in range(n_steps):
                if step == 2:
                    tpu.preempt("qr")
                tpu.step_to_next()
            seen.append(await state_of(clients, "qr"))
            request = {"name": queued_name("qr"), "force": True}
            operation = await clients.v2.delete_queued_resource(request=request)
            assert await state_of(clients, "qr") == "DELETING"
            tpu.step(10)
            await operation.result(timeout=60)
            assert [n async for n in await clients.alpha.list_nodes(parent=PARENT)] == []
        assert seen == ["CREATING", "PROVISIONING", "ACTIVE", "SUSPENDING", "SUSPENDED", "SUSPENDED"]

    async def test_what_is_being_deleted_is_not_deleted_again(self, clients: Clients) -> None:
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        request = {"name": queued_name("qr"), "force": True}
        await clients.alpha.delete_queued_resource(request=request)
        with pytest.raises(exceptions.FailedPrecondition, match="being deleted already"):
            await clients.alpha.delete_queued_resource(request=request)


class TestNodes:
    async def test_update_takes_the_supported_fields(self, tpu: FakeTpu, clients: Clients) -> None:
        """UpdateNode: "Supported fields: [description, tags, labels, metadata, network_config.enable_external_ips]"."""
        await create_active(tpu, clients, "qr")
        changed = {
            "name": node_name("qr"),
            "description": "mine",
            "labels": {"team": "a"},
            "network_config": {"enable_external_ips": True, "network": "other"},
            "runtime_version": "tpu-vm-base",
        }
        mask = {"paths": ["description", "labels", "network_config.enable_external_ips"]}
        operation = await clients.alpha.update_node(request={"node": changed, "update_mask": mask})
        await operation.result(timeout=60)
        found = await clients.v2.get_node(name=node_name("qr"))
        assert (found.description, dict(found.labels)) == ("mine", {"team": "a"})
        assert (found.network_config.enable_external_ips, found.network_config.network) == (True, "")
        assert found.runtime_version == "v2-alpha-tpuv5-lite"

    @pytest.mark.parametrize("path", ["runtime_version", "autocheckpoint_enabled", "accelerator_type"])
    async def test_update_takes_no_other_field(self, tpu: FakeTpu, clients: Clients, path: str) -> None:
        await create_active(tpu, clients, "qr")
        with pytest.raises(exceptions.InvalidArgument, match=path):
            await clients.alpha.update_node(
                request={"node": {"name": node_name("qr")}, "update_mask": {"paths": [path]}}
            )

    async def test_only_single_nodes_stop_and_start(self, tpu: FakeTpu, clients: Clients) -> None:
        """StopNode: "This operation is only available with single TPU nodes"."""
        await create_active(tpu, clients, "single")
        await create_active(tpu, clients, "pod", spec={"node": node(accelerator_type="v5litepod-16")})
        with pytest.raises(exceptions.FailedPrecondition, match="only single TPU nodes"):
            await clients.alpha.stop_node(request={"name": node_name("pod")})
        await clients.alpha.stop_node(request={"name": node_name("single")})
        tpu.step(10)
        assert (await clients.alpha.get_node(name=node_name("single"))).state.name == "STOPPED"
        await clients.alpha.start_node(request={"name": node_name("single")})
        tpu.step(30)
        assert (await clients.alpha.get_node(name=node_name("single"))).state.name == "READY"

    async def test_nodes_can_be_had_without_a_queue(self, tpu: FakeTpu, clients: Clients) -> None:
        operation = await clients.v2.create_node(parent=PARENT, node_id="alone", node=node())
        tpu.step(60)
        assert (await operation.result(timeout=60)).state.name == "READY"
        operation = await clients.v2.delete_node(name=node_name("alone"))
        tpu.step(10)
        await operation.result(timeout=60)
        with pytest.raises(exceptions.NotFound):
            await clients.v2.get_node(name=node_name("alone"))
