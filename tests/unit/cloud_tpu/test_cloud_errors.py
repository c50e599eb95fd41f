"""Every error of google's client becomes one of ours, which says what it means for the request."""

import grpc
import pytest
from google.api_core import exceptions as api_exceptions
from google.auth import exceptions as auth_exceptions
from google.rpc import error_details_pb2

from stepkeeper_operator.cloud_tpu.cloud import ErrorKind
from stepkeeper_operator.cloud_tpu.errors import EXPECTED, explain_error, explain_status


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (api_exceptions.ResourceExhausted("q"), ErrorKind.QUOTA, "RESOURCE_EXHAUSTED"),
        (api_exceptions.PermissionDenied("p"), ErrorKind.TERMINAL, "PERMISSION_DENIED"),
        (api_exceptions.InvalidArgument("i"), ErrorKind.TERMINAL, "INVALID_ARGUMENT"),
        (api_exceptions.NotFound("n"), ErrorKind.NOT_FOUND, "NOT_FOUND"),
        (api_exceptions.AlreadyExists("a"), ErrorKind.ALREADY_EXISTS, "ALREADY_EXISTS"),
        (api_exceptions.FailedPrecondition("f"), ErrorKind.BUSY, "FAILED_PRECONDITION"),
        (api_exceptions.Aborted("f"), ErrorKind.BUSY, "ABORTED"),
        (api_exceptions.ServiceUnavailable("u"), ErrorKind.TRANSIENT, "UNAVAILABLE"),
        (api_exceptions.DeadlineExceeded("d"), ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED"),
        (api_exceptions.InternalServerError("x"), ErrorKind.TRANSIENT, "INTERNAL"),
        (api_exceptions.Unauthenticated("x"), ErrorKind.CREDENTIALS, "UNAUTHENTICATED"),
        (auth_exceptions.DefaultCredentialsError("none"), ErrorKind.CREDENTIALS, "UNAUTHENTICATED"),
        (auth_exceptions.RefreshError("revoked"), ErrorKind.CREDENTIALS, "UNAUTHENTICATED"),
        (auth_exceptions.TransportError("no server"), ErrorKind.TRANSIENT, "UNAVAILABLE"),
        (TimeoutError(), ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED"),
    ],
)
def test_an_error_says_what_it_means(error: Exception, kind: ErrorKind, code: str) -> None:
    assert isinstance(error, EXPECTED)
    explained = explain_error(error)
    assert (explained.kind, explained.code) == (kind, code)


def test_too_many_requests_are_no_exhausted_quota_of_machines() -> None:
    info = error_details_pb2.ErrorInfo(reason="RATE_LIMIT_EXCEEDED", domain="googleapis.com")
    error = api_exceptions.ResourceExhausted("slow down", details=[info], error_info=info)
    assert explain_error(error).kind is ErrorKind.TRANSIENT


def test_the_message_names_exhausted_quotas_wrong_fields_and_reasons() -> None:
    quota = error_details_pb2.QuotaFailure()
    quota.violations.add(subject="TPUV5sPodPerProject", description="limit 0, asked 16")
    fields = error_details_pb2.BadRequest()
    fields.field_violations.add(field="node.runtime_version", description="unknown")
    info = error_details_pb2.ErrorInfo(reason="SERVICE_DISABLED", metadata={"service": "tpu"})
    error = api_exceptions.ResourceExhausted("refused", details=[quota, fields, info])
    assert explain_error(error).message == (
        "refused; TPUV5sPodPerProject: limit 0, asked 16; node.runtime_version: unknown; "
        "SERVICE_DISABLED (service=tpu)"
    )


def test_the_error_of_an_operation_is_known_by_its_number() -> None:
    assert explain_status(7, "no").code == grpc.StatusCode.PERMISSION_DENIED.name
    assert explain_status(99, "?").kind is ErrorKind.TRANSIENT
