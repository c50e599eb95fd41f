"""The fake Cloud TPU API refuses what the documentation of the API's messages forbids; each rule is quoted."""

from typing import Any

import pytest
from google.api_core import exceptions
from google.rpc import error_details_pb2

from tpuapi.clients import (
    Clients,
    create_request,
    node,
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
    "parent: of the form projects/*/locations/*": ("parent", create_request("qr", parent="projects/p")),
    "queued_resource_id: should follow ^[A-Za-z0-9_.~+%-]+$": ("queued_resource_id", create_request("a/b")),
    "request_id: UUID": ("request_id", create_request("qr", request_id="first")),
    "node_id: should follow the regex": (f"{SPEC}.node_id", create_request("qr", node_id="a b")),
    "it's an error to specify both node_id and multi_node_params": (
        f"{SPEC}.multi_node_params",
        create_request("qr", count=2, spec={"node_id": "qr"}),
    ),
    "node_count: needs to be > 1": (f"{SPEC}.multi_node_params.node_count", create_request("qr", count=1)),
    "runtime_version: one that ListRuntimeVersions lists": (
        f"{NODE}.runtime_version",
        with_node(runtime_version="tpu-vm-1"),
    ),
    "an accelerator of the Cloud TPU API: v7x is GKE's": (
        f"{NODE}.accelerator_type",
        with_node(accelerator_type="tpu7x-8"),
    ),
    "topology in chips, of the type": (
        f"{NODE}.accelerator_config.topology",
        with_node(accelerator_type=None, accelerator_config={"type_": "V5LITE_POD", "topology": "2x2x1"}),
    ),
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
    "reservation_name: Format: projects/{project}/locations/{zone}/reservations/{reservation}": (
        "queued_resource.reservation_name",
        create_request("qr", reservation_name="mine"),
    ),
    "valid_until_time in the past": (
        POLICY,
        create_request("qr", queueing_policy={"valid_until_time": "2025-12-31T00:00:00Z"}),
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


async def test_a_name_is_used_once(clients: Clients) -> None:
    await clients.alpha.create_queued_resource(request=create_request("qr"))
    with pytest.raises(exceptions.AlreadyExists) as caught:
        await clients.v2.create_queued_resource(request=create_request("qr"))
    assert caught.value.reason == "RESOURCE_EXISTS"


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
