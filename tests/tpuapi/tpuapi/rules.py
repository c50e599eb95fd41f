"""What the API refuses, by the documentation of its messages, and how it words it."""

import re
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2

from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, CloudTPUError
from stepkeeper_operator.cloud_tpu.errors import explain_status

RUNTIME_VERSIONS: Final = (
    "tpu-ubuntu2204-base",
    "tpu-vm-base",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv6e",
)

_MAX_LABELS: Final = 64
_ID: Final = re.compile(r"[A-Za-z0-9_.~+%-]+")
_LABEL_KEY: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE: Final = re.compile(r"[a-z0-9_-]{0,63}")
_TAG: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")

Window = tuple[float, float | None]
"""When nodes may be created: not before and not after, in Unix seconds; None: at any time."""


class RefusedError(CloudTPUError):
    """The API refuses a request, with the details that Google's services send."""

    def __init__(self, code: str, message: str, *details: Any) -> None:
        explained = explain_status(number_of(code), message)
        super().__init__(explained.kind, explained.code, message)
        self.details = details
        """Messages of google.rpc."""


def number_of(code: str) -> int:
    """Return the number of a canonical code.

    Raises:
        ValueError: There is none of that name.
    """
    if code not in grpc.StatusCode.__members__:
        raise ValueError(f"'{code}' is no code of google.rpc")
    return int(grpc.StatusCode[code].value[0])


def invalid(field: str, description: str) -> RefusedError:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    message = f"Invalid value for field '{field}': {description}"
    return RefusedError(
        "INVALID_ARGUMENT", message, error_details_pb2.BadRequest(field_violations=[violation])
    )


def not_found(name: str) -> RefusedError:
    return RefusedError("NOT_FOUND", f"Resource '{name}' was not found")


def quota_exceeded(quota: str, limit: int, zone: str) -> RefusedError:
    message = f"Quota limit '{quota}' has been exceeded. Limit: {limit} in zone {zone}."
    violation = error_details_pb2.QuotaFailure.Violation(subject=f"zone:{zone}", description=message)
    info = error_details_pb2.ErrorInfo(
        reason="RESOURCE_QUOTA_EXCEEDED", domain="tpu.googleapis.com", metadata={"quota_limit": quota}
    )
    return RefusedError(
        "RESOURCE_EXHAUSTED", message, info, error_details_pb2.QuotaFailure(violations=[violation])
    )


def check_request(request: CloudRequest, now: float) -> None:
    """Check a request to create a queued resource, all but its accelerator.

    Raises:
        RefusedError: It breaks a rule.
    """
    for name in (request.id, *request.node_ids):
        if _ID.fullmatch(name) is None:
            raise invalid("queued_resource_id", f"'{name}' does not follow ^{_ID.pattern}$")
    if request.node.get("runtime_version") not in RUNTIME_VERSIONS:
        raise invalid("runtime_version", f"'{request.node.get('runtime_version')}' is no known version")
    check_labels(request.node.get("labels", {}))
    for tag in request.node.get("tags", ()):
        if _TAG.fullmatch(tag) is None:
            raise invalid("tags", f"'{tag}' is no network tag (RFC 1035)")
    if request.api_version is ApiVersion.V2 and show_in_v2(request.node, request.tier) != (
        request.node,
        request.tier,
    ):
        raise invalid("queued_resource", "it has fields that only v2alpha1 has")
    if request.reservation_name is not None:
        raise not_found(request.reservation_name)
    not_before, not_after = read_window(request.queueing, now)
    if not_after is not None and not_after <= max(now, not_before):
        raise invalid("queueing_policy", "the time by which the request has to be fulfilled has passed")


def check_request_id(request_id: str) -> None:
    """Refuse an id that is no UUID, or that of zeros. A request may have none.

    Raises:
        RefusedError: It is none.
    """
    try:
        known = not request_id or uuid.UUID(request_id).int
    except ValueError:
        known = False
    if not known:
        raise invalid("request_id", f"'{request_id}' is no UUID")


def check_labels(labels: Mapping[str, str]) -> None:
    """Hold labels to the form that labels have on all of Google Cloud.

    Raises:
        RefusedError: They don't have it.
    """
    if len(labels) > _MAX_LABELS:
        raise invalid("labels", f"more than {_MAX_LABELS} labels")
    for key, value in labels.items():
        if _LABEL_KEY.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
            raise invalid("labels", f"'{key}: {value}' is not up to 63 lower-case letters, digits, _ and -")


def show_in_v2(
    node: Mapping[str, Any], tier: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return node and tier of a request without what only v2alpha1 has."""
    known = {key: value for key, value in node.items() if key != "autocheckpoint_enabled"}
    tiers = {
        name: {key: value for key, value in fields.items() if key != "reserved"}
        for name, fields in tier.items()
        if name != "best_effort"
    }
    return known, tiers


def read_window(queueing: Mapping[str, Any], asked_at: float) -> Window:
    """Read when nodes of a request may be created that was made at `asked_at`."""
    match queueing:
        case {"valid_until_duration": str(text)}:
            return 0.0, asked_at + float(text.removesuffix("s"))
        case {"valid_until_time": str(text)}:
            return 0.0, _read_time(text)
        case {"valid_after_duration": str(text)}:
            return asked_at + float(text.removesuffix("s")), None
        case {"valid_after_time": str(text)}:
            return _read_time(text), None
        case {"valid_interval": interval}:
            return _read_time(interval["start_time"]), _read_time(interval["end_time"])
        case _:
            return 0.0, None


def _read_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
