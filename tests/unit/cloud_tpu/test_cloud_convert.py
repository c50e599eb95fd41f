"""The values of the operator and the messages of the Cloud TPU API are equivalent, in both versions."""

from typing import Any

import pytest
from google.cloud import tpu_v2, tpu_v2alpha1
from google.protobuf import json_format

from fake_cluster.queued_resources import make_resource
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudMaintenance, CloudRequest, Place
from stepkeeper_operator.cloud_tpu.convert import build_queued_resource, read_node, read_queued_resource
from stepkeeper_operator.cloud_tpu.request import build_request

PLACE = Place(project="lab-tpus", zone="us-central2-b")
MODULES = {ApiVersion.V2: tpu_v2, ApiVersion.V2ALPHA1: tpu_v2alpha1}
NAME = f"{PLACE.parent}/queuedResources/train-1"


def request_of(version: ApiVersion, **changes: Any) -> CloudRequest:
    fields: dict[str, Any] = {
        "place": PLACE,
        "id": "train-1",
        "request_id": "7d44",
        "api_version": version,
        "node_ids": ("train-1",),
        "node_id_prefix": None,
        "node": {
            "accelerator_config": {"type": "V5P", "topology": "2x2x2"},
            "runtime_version": "v2-alpha-tpuv5",
            "labels": {"stepkeeper-uid": "u"},
            "shielded_instance_config": {"enable_secure_boot": True},
        },
        "tier": {"guaranteed": {"min_duration": "3600s"}},
        "queueing": {"valid_until_duration": "7200s"},
        "reservation_name": "projects/p/locations/z/reservations/r",
    }
    return CloudRequest(**(fields | changes))


def as_answered(request: CloudRequest, **output: Any) -> Any:
    """The message that the API would answer with: the request's, plus output fields."""
    empty = MODULES[request.api_version].QueuedResource.pb()()
    message = build_queued_resource(request, empty)
    return json_format.ParseDict({"name": NAME, **output}, message)


DAY, LATER = "2026-12-01T00:00:00Z", "2026-12-01T08:00:00Z"


@pytest.mark.parametrize("version", ApiVersion)
@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {}),
        ({"validUntilSeconds": 600}, {"valid_until_duration": "600s"}),
        ({"validUntilTime": DAY}, {"valid_until_time": DAY}),
        ({"validAfterTime": DAY}, {"valid_after_time": DAY}),
        (
            {"validAfterTime": DAY, "validUntilTime": LATER},
            {"valid_interval": {"start_time": DAY, "end_time": LATER}},
        ),
    ],
)
def test_a_request_is_read_back_as_it_was_written(
    asked: dict[str, Any], sent: dict[str, Any], version: ApiVersion
) -> None:
    built = build_request(make_resource(queueing=asked), number=0, cluster_id="c", script=None)
    assert built.queueing == sent
    request = request_of(version, queueing=built.queueing)
    read = read_queued_resource(as_answered(request, state={"state": "WAITING_FOR_RESOURCES"}))
    assert (read.place, read.name, read.state) == (PLACE, NAME, "WAITING_FOR_RESOURCES")
    for field in ("node_ids", "node", "tier", "queueing", "reservation_name"):
        assert getattr(read, field) == getattr(request, field)


@pytest.mark.parametrize("version", ApiVersion)
def test_several_nodes_are_asked_for_by_a_prefix_in_the_version_s_own_field(version: ApiVersion) -> None:
    request = request_of(version, node_ids=("run-0", "run-1"), node_id_prefix="run")
    message = as_answered(request)
    spec = message.tpu.node_spec[0]
    many = spec.multislice_params if version is ApiVersion.V2 else spec.multi_node_params
    assert (many.node_count, many.node_id_prefix, spec.node_id) == (2, "run", "")
    assert read_queued_resource(message).node_ids == ("run-0", "run-1")


@pytest.mark.parametrize(
    "fields",
    [
        {"node": {"runtime_version": "x", "autocheckpoint_enabled": True}},
        {"tier": {"best_effort": {}}},
        {"tier": {"guaranteed": {"reserved": True}}},
    ],
)
def test_autocheckpoint_best_effort_and_reserved_exist_in_v2alpha1_only(fields: dict[str, Any]) -> None:
    read = read_queued_resource(as_answered(request_of(ApiVersion.V2ALPHA1, **fields)))
    assert {"node": read.node, "tier": read.tier}.items() >= fields.items()
    with pytest.raises(json_format.ParseError):
        as_answered(request_of(ApiVersion.V2, **fields))


def test_a_failure_carries_its_code_and_the_cloud_s_words() -> None:
    error = {"code": 8, "message": "Quota 'TPUV5sPreemptible' exhausted. Limit 0 in region us-central2"}
    state = {"state": "FAILED", "failed_data": {"error": error}, "state_initiator": "SERVICE"}
    read = read_queued_resource(as_answered(request_of(ApiVersion.V2), state=state))
    assert (read.state, read.initiator) == ("FAILED", "SERVICE")
    assert (read.error_code, read.error_message) == ("RESOURCE_EXHAUSTED", error["message"])


def test_a_node_tells_hosts_symptoms_and_maintenance() -> None:
    raw = {
        "name": f"{PLACE.parent}/nodes/train-1",
        "state": "READY",
        "health": "UNHEALTHY_MAINTENANCE",
        "network_endpoints": [{"ip_address": "10.0.0.2"}, {"ip_address": "10.0.0.3"}],
        "symptoms": [
            {"symptom_type": kind, "worker_id": worker, "create_time": f"2026-01-0{day}T00:00:00Z"}
            for kind, worker, day in (("LOW_MEMORY", "0", 1), ("MESH_BUILD_FAIL", "1", 2))
        ],
        "queued_resource": NAME,
        "upcoming_maintenance": {
            "type_": "SCHEDULED",
            "maintenance_status": "PENDING",
            "window_start_time": "2026-11-22T10:00:00Z",
        },
    }
    node = read_node(json_format.ParseDict(raw, tpu_v2alpha1.Node.pb()()), ApiVersion.V2ALPHA1)
    assert (node.id, node.state, node.n_hosts) == ("train-1", "READY", 2)
    assert node.addresses == ("10.0.0.2", "10.0.0.3")
    assert node.symptoms == ("MESH_BUILD_FAIL on worker 1", "LOW_MEMORY on worker 0")
    assert node.maintenance == CloudMaintenance(type="SCHEDULED", status="PENDING", window_start=1795341600)
    assert node.autocheckpoint_enabled is False
    v2 = read_node(tpu_v2.Node.pb()(name=raw["name"]), ApiVersion.V2)
    assert v2.autocheckpoint_enabled is None, "it can't tell"
    raw = {"name": f"{PLACE.parent}/nodes/a", "upcoming_maintenance": {"window_start_time": "soon"}}
    unclear = read_node(json_format.ParseDict(raw, tpu_v2alpha1.Node.pb()()), ApiVersion.V2ALPHA1).maintenance
    assert unclear is not None
    assert unclear.window_start is None
