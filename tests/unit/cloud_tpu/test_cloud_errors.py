"""Every error of google's client becomes one of ours, which says what it means for the request."""

from typing import Any

import grpc
import pytest
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.rpc import error_details_pb2

from stepkeeper_operator.cloud_tpu.cloud import ErrorKind
from stepkeeper_operator.cloud_tpu.errors import (
    EXPECTED,
    TOKEN_ERRORS,
    explain_error,
    explain_status,
    explain_token_error,
)

MEANINGS = {
    ErrorKind.QUOTA: [api.ResourceExhausted("")],
    ErrorKind.TERMINAL: [api.PermissionDenied(""), api.InvalidArgument("")],
    ErrorKind.NOT_FOUND: [api.NotFound("")],
    ErrorKind.ALREADY_EXISTS: [api.AlreadyExists("")],
    ErrorKind.BUSY: [api.FailedPrecondition(""), api.Aborted("")],
    ErrorKind.TRANSIENT: [
        *(api.ServiceUnavailable(""), api.DeadlineExceeded(""), api.InternalServerError("")),
    ],
    ErrorKind.CREDENTIALS: [api.Unauthenticated("")],
}


@pytest.mark.parametrize(("kind", "errors"), MEANINGS.items())
def test_an_error_says_what_it_means(kind: ErrorKind, errors: list[Any]) -> None:
    for error in errors:
        explained = explain_error(error)
        assert (explained.kind, explained.code) == (kind, error.grpc_status_code.name)
        assert isinstance(error, EXPECTED)
    assert isinstance(TimeoutError(), EXPECTED)
    assert explain_error(TimeoutError()).code == "DEADLINE_EXCEEDED"


URL = "https://sts.example.com/token"
NO_SERVER = auth.TransportError("no server")
REVOKED = auth.RefreshError("revoked", {"error": "invalid_grant"})
REFUSED = auth.RefreshError(auth.TransportError("Status: 404", object()))


@pytest.mark.parametrize(
    ("error", "url", "status"),
    [
        (auth.DefaultCredentialsError("none"), "", None),
        (auth.DefaultCredentialsError("no metadata server"), URL, None),
        (auth.RefreshError("the token's file is missing"), "", None),
        (REVOKED, URL, 400),
        (auth.OAuthError("invalid_grant", "{}"), URL, 400),
        (auth.RefreshError("denied"), URL, 403),
        (REFUSED, URL, 404),
        (PermissionError(13, "Permission denied", "/key.json"), "", None),
        (ValueError("not a key"), "", None),
    ],
)
def test_a_token_that_somebody_refused_or_that_can_not_be_is_missing_for_long(
    error: Exception, url: str, status: int | None
) -> None:
    assert isinstance(error, TOKEN_ERRORS)
    assert explain_token_error(error, url=url, status=status).kind is ErrorKind.CREDENTIALS


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (auth.OAuthError("down"), 503),
        (auth.OAuthError("slow down"), 429),
        (auth.RefreshError("server_error", retryable=True), 400),
        (auth.RefreshError(NO_SERVER), None),
        (NO_SERVER, None),
    ],
)
def test_a_token_of_an_endpoint_that_is_down_is_there_soon(error: Exception, status: int | None) -> None:
    assert isinstance(error, TOKEN_ERRORS)
    assert explain_token_error(error, url=URL, status=status).kind is ErrorKind.TRANSIENT


def test_the_words_of_a_refusal_are_the_auth_library_s_and_no_more() -> None:
    error = auth.RefreshError(auth.TransportError("Status: 403", object()))
    assert explain_token_error(error, url=URL, status=403).message == "Status: 403"
    refused = PermissionError(13, "Permission denied", "/key.json")
    assert "/key.json" in explain_token_error(refused, url="", status=None).message


def test_an_endpoint_that_does_not_answer_is_told_in_the_same_words_each_time() -> None:
    texts = {
        explain_token_error(
            auth.TransportError(OSError(f"<connection at {hex(at)}>")), url=URL, status=None
        ).message
        for at in range(2)
    }
    assert len(texts) == 1
    assert URL in texts.pop()


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
