"""Refusals of the API, as values: a canonical code, a message for people, and the details that programs read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

DOMAIN = "tpu.googleapis.com"


class Code(IntEnum):
    """Google's canonical codes, numbered as in google.rpc.Code."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field of a request that breaks a rule (google.rpc.BadRequest)."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaViolation:
    """One limit that a request exceeds (google.rpc.QuotaFailure)."""

    subject: str
    description: str
    quota_metric: str
    quota_id: str
    limit: int
    dimensions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreconditionViolation:
    """One thing about the state of a resource that forbids the request (google.rpc.PreconditionFailure)."""

    kind: str
    subject: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """An outcome other than success; google.rpc.Status on the wire."""

    code: Code
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[FieldViolation, ...] = ()
    quotas: tuple[QuotaViolation, ...] = ()
    preconditions: tuple[PreconditionViolation, ...] = ()
    resource_name: str = ""


class ApiError(Exception):
    """The API refuses the request."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{status.code.name}: {status.message}")
        self.status = status


def invalid(field_path: str, description: str) -> ApiError:
    """Refuse a request for a field of it."""
    violation = FieldViolation(field=field_path, description=description)
    message = f"Invalid value for field '{field_path}': {description}"
    return ApiError(
        Status(code=Code.INVALID_ARGUMENT, message=message, reason="INVALID_FIELD", fields=(violation,))
    )


def not_found(name: str) -> ApiError:
    message = f"Resource '{name}' was not found"
    return ApiError(
        Status(code=Code.NOT_FOUND, message=message, reason="RESOURCE_NOT_FOUND", resource_name=name)
    )


def already_exists(name: str) -> ApiError:
    message = f"Resource '{name}' already exists"
    return ApiError(
        Status(code=Code.ALREADY_EXISTS, message=message, reason="RESOURCE_EXISTS", resource_name=name)
    )


def failed_precondition(name: str, kind: str, description: str) -> ApiError:
    """Refuse a request for the state that a resource is in.

    Args:
        name: The resource.
        kind: The kind of precondition, an upper-case word.
        description: The reason, for people.
    """
    violation = PreconditionViolation(kind=kind, subject=name, description=description)
    return ApiError(
        Status(
            code=Code.FAILED_PRECONDITION,
            message=description,
            reason=kind,
            preconditions=(violation,),
            resource_name=name,
        )
    )
