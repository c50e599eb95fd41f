"""The operator's client of the Cloud TPU API, against a service that speaks it over the network."""

from collections.abc import AsyncIterator

import pytest

from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, Place
from stepkeeper_operator.cloud_tpu.polling import Poller
from tpuapi.cloud import FakeCloud
from tpuapi.wire import serving

PLACE = Place(project="a-project", zone="us-west4-a")
ALPHA, V2 = ApiVersion.V2ALPHA1, ApiVersion.V2


@pytest.fixture
async def cloud(tpu: FakeCloud) -> AsyncIterator[GoogleCloudTPU]:
    async with serving(tpu, max_page_size=2) as address:
        client = GoogleCloudTPU(endpoint=address, insecure=True)
        yield client
        await client.close()


def request_of(
    name: str = "train-0", *, version: ApiVersion = ALPHA, n_nodes: int = 1, request_id: str = ""
) -> CloudRequest:
    node = {
        "accelerator_type": "v5litepod-4",
        "runtime_version": "v2-alpha-tpuv5-lite",
        "labels": {"stepkeeper-uid": "u-1"},
    }
    if version is ALPHA:
        node["autocheckpoint_enabled"] = True  # type: ignore[assignment]  # JSON of several types
    many = n_nodes > 1
    return CloudRequest(
        place=PLACE,
        id=name,
        request_id=request_id,
        api_version=version,
        node_ids=tuple(f"{name}-{n}" for n in range(n_nodes)) if many else (name,),
        node_id_prefix=name if many else None,
        node=node,
        tier={"guaranteed": {}},
        queueing={},
    )


@pytest.mark.smoke
@pytest.mark.parametrize("version", ApiVersion)
@pytest.mark.parametrize("n_nodes", [1, 2])
async def test_what_is_created_is_listed_becomes_active_and_is_deleted_with_its_nodes(
    tpu: FakeCloud, cloud: GoogleCloudTPU, version: ApiVersion, n_nodes: int
) -> None:
    request = request_of(version=version, n_nodes=n_nodes)
    operation = await cloud.create_queued_resource(request)
    (listed,) = await cloud.list_queued_resources(PLACE, version)
    assert (listed.id, listed.node_ids, listed.node, listed.tier) == (
        request.id,
        request.node_ids,
        request.node,
        request.tier,
    )
    while listed.state != "ACTIVE":
        assert tpu.step_to_next() > 0
        known = await cloud.get_queued_resource(PLACE, request.id, version)
        assert known is not None
        listed = known
    done = await cloud.get_operation(operation, version)
    assert done is not None
    assert (done.done, done.error) == (True, None)
    nodes = await cloud.list_nodes(PLACE, version)
    assert [(node.id, node.state, node.n_hosts) for node in nodes] == [
        (node_id, "READY", 1) for node_id in request.node_ids
    ]
    assert {node.queued_resource for node in nodes} == {listed.name}
    assert await cloud.get_node(PLACE, nodes[0].id, version) == nodes[0]
    assert {node.autocheckpoint_enabled for node in nodes} == {True if version is ALPHA else None}
    assert await cloud.delete_queued_resource(PLACE, request.id, request_id="", version=version) is not None
    while await cloud.get_queued_resource(PLACE, request.id, version) is not None:
        assert tpu.step_to_next() > 0
    assert await cloud.list_nodes(PLACE, version) == ()
    assert await cloud.delete_queued_resource(PLACE, request.id, request_id="", version=version) is None


async def test_many_are_listed_page_by_page(cloud: GoogleCloudTPU) -> None:
    for number in range(3):
        await cloud.create_queued_resource(request_of(f"train-{number}"))
    listing = await Poller(cloud).list_place(PLACE, newer_than=0.0)
    assert set(listing.resources) == {"train-0", "train-1", "train-2"}


async def test_an_unknown_operation_or_resource_is_none(cloud: GoogleCloudTPU) -> None:
    assert await cloud.get_operation(f"{PLACE.parent}/operations/operation-1", ALPHA) is None
    for version in ApiVersion:
        assert await cloud.get_queued_resource(PLACE, "nobody", version) is None
        assert await cloud.get_node(PLACE, "nobody", version) is None


@pytest.mark.parametrize("version", [ALPHA, V2])
async def test_labels_of_a_live_node_are_replaced(
    cloud: GoogleCloudTPU, tpu: FakeCloud, version: ApiVersion
) -> None:
    await cloud.create_queued_resource(request_of(version=version))
    for _ in range(40):
        tpu.step(10)
    (before,) = await cloud.list_nodes(PLACE, version)
    assert before.labels == {"stepkeeper-uid": "u-1"}
    await cloud.set_node_labels(PLACE, before.id, {"stepkeeper-uid": "u-2", "team": "blue"}, version)
    (after,) = await cloud.list_nodes(PLACE, version)
    assert after.labels == {"stepkeeper-uid": "u-2", "team": "blue"}
    (resource,) = await cloud.list_queued_resources(PLACE, version)
    assert resource.node["labels"] == {"stepkeeper-uid": "u-1"}, "the request keeps its own"
    await cloud.set_node_labels(PLACE, "nobody", {}, version)
