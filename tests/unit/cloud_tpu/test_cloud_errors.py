"""Every error of Google's client is converted to a CloudTPUError of the right kind."""

from typing import Any

import grpc
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.rpc import error_details_pb2

from fake_cluster.stories import table
from stepkeeper_operator.cloud_tpu.cloud import ErrorKind
from stepkeeper_operator.cloud_tpu.errors import (
    EXPECTED,
    TOKEN_ERRORS,
    explain_error,
    explain_status,
    explain_token_error,
)

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
