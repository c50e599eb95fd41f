"""Values and errors of the operator and the messages and errors of Google's client are equivalent, in both versions."""

from typing import Any

import grpc
import pytest
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.cloud import tpu_v2, tpu_v2alpha1
from google.protobuf import json_format
from google.rpc import error_details_pb2

from fake_cluster.queued_resources import make_resource
from fake_cluster.stories import table
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudMaintenance, CloudRequest, ErrorKind, Place
from stepkeeper_operator.cloud_tpu.convert import build_queued_resource, read_node, read_queued_resource
from stepkeeper_operator.cloud_tpu.errors import (
    EXPECTED,
    TOKEN_ERRORS,
    explain_error,
    explain_status,
    explain_token_error,
)
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


MEANINGS: dict[ErrorKind, list[Any]] = {
    ErrorKind.QUOTA: [api.ResourceExhausted],
    ErrorKind.TERMINAL: [api.PermissionDenied, api.InvalidArgument],
    ErrorKind.NOT_FOUND: [api.NotFound],
    ErrorKind.ALREADY_EXISTS: [api.AlreadyExists],
    ErrorKind.BUSY: [api.FailedPrecondition, api.Aborted],
    ErrorKind.TRANSIENT: [api.ServiceUnavailable, api.DeadlineExceeded, api.InternalServerError],
    ErrorKind.CREDENTIALS: [api.Unauthenticated],
}


def test_an_error_says_what_it_means() -> None:
    for kind, errors in MEANINGS.items():
        for error in errors:
            explained = explain_error(error(""))
            assert (explained.kind, explained.code) == (kind, error.grpc_status_code.name)
            assert issubclass(error, EXPECTED)
    assert isinstance(TimeoutError(), EXPECTED)
    assert explain_error(TimeoutError()).code == "DEADLINE_EXCEEDED"


URL = "https://sts.example.com/token"
NO_SERVER = auth.TransportError("no server")
REVOKED = auth.RefreshError("revoked", {"error": "invalid_grant"})
REFUSED = auth.RefreshError(auth.TransportError("Status: 403", object()))
NO_ACCESS = PermissionError(13, "Permission denied", "/key.json")
FOR_LONG, FOR_MOMENTS = ErrorKind.CREDENTIALS, ErrorKind.TRANSIENT


@table(
    "error, url, status, kind",
    {
        "no credentials": (auth.DefaultCredentialsError("none"), "", None, FOR_LONG),
        "no metadata server": (auth.DefaultCredentialsError("no metadata server"), URL, None, FOR_LONG),
        "a file is missing": (auth.RefreshError("the token's file is missing"), "", None, FOR_LONG),
        "a revoked token": (REVOKED, URL, 400, FOR_LONG),
        "an invalid grant": (auth.OAuthError("invalid_grant", "{}"), URL, 400, FOR_LONG),
        "a refusal": (REFUSED, URL, 403, FOR_LONG),
        "a file that can't be read": (NO_ACCESS, "", None, FOR_LONG),
        "a file with something else": (ValueError("not a key"), "", None, FOR_LONG),
        "an endpoint that is down": (auth.OAuthError("down"), URL, 503, FOR_MOMENTS),
        "an endpoint with too much to do": (auth.OAuthError("slow down"), URL, 429, FOR_MOMENTS),
        "its error": (auth.RefreshError("server_error", retryable=True), URL, 400, FOR_MOMENTS),
        "no answer of it": (auth.RefreshError(NO_SERVER), URL, None, FOR_MOMENTS),
        "no endpoint": (NO_SERVER, URL, None, FOR_MOMENTS),
    },
)
def test_a_token_is_missing_for_long_or_for_moments(
    error: Exception, url: str, status: int | None, kind: ErrorKind
) -> None:
    assert isinstance(error, TOKEN_ERRORS)
    assert explain_token_error(error, url=url, status=status).kind is kind


def test_the_words_of_a_refusal_are_the_auth_library_s_and_no_more() -> None:
    assert explain_token_error(REFUSED, url=URL, status=403).message == "Status: 403"
    assert "/key.json" in explain_token_error(NO_ACCESS, url="", status=None).message
    lost = [auth.TransportError(OSError(f"<connection at {hex(at)}>")) for at in range(2)]
    first, second = (explain_token_error(error, url=URL, status=None).message for error in lost)
    assert first == second, "the same words each time"
    assert URL in first


def test_too_many_requests_are_no_exhausted_quota_of_machines() -> None:
    info = error_details_pb2.ErrorInfo(reason="RATE_LIMIT_EXCEEDED", domain="googleapis.com")
    error = api.ResourceExhausted("slow down", details=[info], error_info=info)
    assert explain_error(error).kind is ErrorKind.TRANSIENT


def test_the_message_names_exhausted_quotas_wrong_fields_and_reasons() -> None:
    quota = error_details_pb2.QuotaFailure()
    quota.violations.add(subject="TPUV5sPodPerProject", description="limit 0, asked 16")
    fields = error_details_pb2.BadRequest()
    fields.field_violations.add(field="node.runtime_version", description="unknown")
    info = error_details_pb2.ErrorInfo(reason="SERVICE_DISABLED", metadata={"service": "tpu"})
    error = api.ResourceExhausted("refused", details=[quota, fields, info])
    assert explain_error(error).message == (
        "refused; TPUV5sPodPerProject: limit 0, asked 16; node.runtime_version: unknown; "
        "SERVICE_DISABLED (service=tpu)"
    )


def test_the_error_of_an_operation_is_known_by_its_number() -> None:
    assert explain_status(7, "no").code == grpc.StatusCode.PERMISSION_DENIED.name
    assert explain_status(99, "?").kind is ErrorKind.TRANSIENT
