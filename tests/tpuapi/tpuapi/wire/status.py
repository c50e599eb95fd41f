"""Refusals on the wire: google.rpc.Status with details, as Google's services send it beside the gRPC status."""

from typing import Any

from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tpuapi.core.errors import DOMAIN, Status


def to_proto(status: Status) -> status_pb2.Status:
    """Write a status with all its details."""
    return status_pb2.Status(
        code=int(status.code),
        message=status.message,
        details=[_packed(detail) for detail in _details(status)],
    )


def to_grpc(status: Status) -> Any:
    """Write a status as what `context.abort_with_status` wants."""
    return rpc_status.to_status(to_proto(status))


def _details(status: Status) -> list[Message]:
    details: list[Message] = []
    if status.reason:
        details.append(
            error_details_pb2.ErrorInfo(reason=status.reason, domain=DOMAIN, metadata=dict(status.metadata))
        )
    if status.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=each.field, description=each.description)
            for each in status.fields
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if status.quotas:
        details.append(_quota_failure(status))
    if status.preconditions:
        preconditions = [
            error_details_pb2.PreconditionFailure.Violation(
                type=each.kind, subject=each.subject, description=each.description
            )
            for each in status.preconditions
        ]
        details.append(error_details_pb2.PreconditionFailure(violations=preconditions))
    if status.resource_name:
        details.append(error_details_pb2.ResourceInfo(resource_name=status.resource_name))
    return details


def _quota_failure(status: Status) -> error_details_pb2.QuotaFailure:
    return error_details_pb2.QuotaFailure(
        violations=[
            error_details_pb2.QuotaFailure.Violation(
                subject=each.subject,
                description=each.description,
                api_service=DOMAIN,
                quota_metric=each.quota_metric,
                quota_id=each.quota_id,
                quota_dimensions=dict(each.dimensions),
                quota_value=each.limit,
            )
            for each in status.quotas
        ]
    )


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
