"""Test that the cloud in memory keeps to what the Cloud TPU API documents, where the operator depends on it."""

import uuid
from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.queued_resources import CLUSTER_ID, make_resource
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, CloudTPUError
from stepkeeper_operator.queued_resources.request import build_request
from tpuapi.cloud import FakeCloud

ALPHA = ApiVersion.V2ALPHA1
ID = "team-v5e"


def request_of(cloud_id: str = ID, request_id: str = "", **node: Any) -> CloudRequest:
    """Make a request as the operator does, with changes to its node."""
    made = build_request(make_resource(), number=0, cluster_id=CLUSTER_ID, script=None)
    return replace(made, id=cloud_id, node_ids=(cloud_id,), request_id=request_id, node={**made.node, **node})


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
