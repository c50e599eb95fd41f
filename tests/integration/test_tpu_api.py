"""The Cloud TPU API to test against, over the network: it shows what it shows in memory, and runs as a process."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fake_cluster.queued_resources import CLUSTER_ID, PLACE, make_resource
from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, CloudTPU, CloudTPUError
from stepkeeper_operator.queued_resources.request import build_request
from tpuapi.cloud import FakeCloud
from tpuapi.wire import serving

ALPHA = ApiVersion.V2ALPHA1
SPECS: dict[str, dict[str, Any]] = {
    "guaranteed": {"tier": {"guaranteed": {"minDurationSeconds": 3600}}},
    "three best-effort slices": {"tier": {"bestEffort": {}}, "node": {"count": 3}},
    "a topology": {
        "node": {
            "acceleratorType": None,
            "acceleratorConfig": {"type": "V5P", "topology": "2x2x2"},
            "tags": ["web"],
        }
    },
    "a limit": {"queueing": {"validUntilSeconds": 600}},
}


@pytest.fixture
async def client(tpu: FakeCloud) -> AsyncIterator[GoogleCloudTPU]:
    async with serving(tpu) as address:
        made = GoogleCloudTPU(endpoint=address, insecure=True)
        yield made
        await made.close()


def request_of(**spec: Any) -> CloudRequest:
    return build_request(make_resource(**spec), number=0, cluster_id=CLUSTER_ID, script="#!/bin/sh\n")


async def look(cloud: CloudTPU) -> list[object]:
    """Return all that a cloud shows, by both versions."""
    return [
        each
        for version in ApiVersion
        for each in (
            *await cloud.list_queued_resources(PLACE, version),
            *await cloud.list_nodes(PLACE, version),
        )
    ]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
async def test_over_the_network_all_is_as_it_is_in_memory(
    tpu: FakeCloud, client: GoogleCloudTPU, spec: dict[str, Any]
) -> None:
    request = request_of(**spec)
    beside = FakeCloud()
    for cloud in (client, beside):
        await cloud.create_queued_resource(request)
    seen = set()
    while tpu.resources[PLACE, request.id].state != "SUSPENDED":
        shown = await look(client)
        assert shown == await look(tpu) == await look(beside)
        seen |= {node.state for node in tpu.nodes.values()}
        for cloud in (tpu, beside):
            if cloud.step_to_next() == 0 and cloud.nodes:
                node = request.node_ids[-1]
                cloud.announce_maintenance(node, starts_in_s=60, lasts_s=60, ends_in="TERMINATED")
    assert seen >= {"CREATING", "READY", "TERMINATED"}
    tpu.fail(request.id, "RESOURCE_EXHAUSTED", "no quota")
    (failed,) = await client.list_queued_resources(PLACE, ALPHA)
    assert (failed.state, failed.error_code, failed.error_message) == (
        "FAILED",
        "RESOURCE_EXHAUSTED",
        "no quota",
    )


async def test_refusals_carry_their_details(tpu: FakeCloud, client: GoogleCloudTPU) -> None:
    tpu.set_quota("v5litepod", 4)
    with pytest.raises(CloudTPUError, match=r"RESOURCE_QUOTA_EXCEEDED.*TPUPreemptibleV5sLitepod"):
        await client.create_queued_resource(request_of())
    with pytest.raises(CloudTPUError, match=r"labels: 'team: x\.y' is not"):
        await client.create_queued_resource(request_of(node={"labels": {"team": "x.y"}}))
