"""Every error of google's client becomes one of ours, which says what it means for the request."""

import grpc
import pytest
from google.api_core import exceptions as api_exceptions
from google.auth import exceptions as auth_exceptions
from google.rpc import error_details_pb2

from stepkeeper_operator.cloud_tpu.cloud import ErrorKind
from stepkeeper_operator.cloud_tpu.errors import (
    EXPECTED,
    TOKEN_ERRORS,
    explain_error,
    explain_status,
    explain_token_error,
)


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
        (TimeoutError(), ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED"),
    ],
)
def test_an_error_says_what_it_means(error: Exception, kind: ErrorKind, code: str) -> None:
    assert isinstance(error, EXPECTED)
    explained = explain_error(error)
    assert (explained.kind, explained.code) == (kind, code)


URL = "https://sts.example.com/token"
TRANSPORT = auth_exceptions.TransportError("no server")


@pytest.mark.parametrize(
    ("error", "url", "status", "kind"),
    [
        (auth_exceptions.DefaultCredentialsError("none"), "", None, ErrorKind.CREDENTIALS),
        (auth_exceptions.DefaultCredentialsError("no metadata server"), URL, None, ErrorKind.CREDENTIALS),
        (auth_exceptions.RefreshError("the token's file is missing"), "", None, ErrorKind.CREDENTIALS),
        (
            auth_exceptions.RefreshError("revoked", {"error": "invalid_grant"}),
            URL,
            400,
            ErrorKind.CREDENTIALS,
        ),
        (auth_exceptions.OAuthError("invalid_grant", "{}"), URL, 400, ErrorKind.CREDENTIALS),
        (auth_exceptions.RefreshError("denied"), URL, 403, ErrorKind.CREDENTIALS),
        (
            auth_exceptions.RefreshError(auth_exceptions.TransportError("Status: 404", object())),
            URL,
            404,
            ErrorKind.CREDENTIALS,
        ),
        (auth_exceptions.OAuthError("down"), URL, 503, ErrorKind.TRANSIENT),
        (auth_exceptions.OAuthError("slow down"), URL, 429, ErrorKind.TRANSIENT),
        (auth_exceptions.RefreshError("server_error", retryable=True), URL, 400, ErrorKind.TRANSIENT),
        (auth_exceptions.RefreshError(TRANSPORT), URL, None, ErrorKind.TRANSIENT),
        (TRANSPORT, URL, None, ErrorKind.TRANSIENT),
        (TRANSPORT, URL, 200, ErrorKind.TRANSIENT),
        (PermissionError(13, "Permission denied", "/key.json"), "", None, ErrorKind.CREDENTIALS),
        (ValueError("not a key"), "", None, ErrorKind.CREDENTIALS),
    ],
)
def test_a_missing_token_is_lasting_where_somebody_refused_it(
    error: Exception, url: str, status: int | None, kind: ErrorKind
) -> None:
    assert isinstance(error, TOKEN_ERRORS)
    assert explain_token_error(error, url=url, status=status).kind is kind


def test_the_words_of_a_refusal_are_the_auth_library_s_and_no_more() -> None:
    error = auth_exceptions.RefreshError(auth_exceptions.TransportError("Status: 403", object()))
    assert explain_token_error(error, url=URL, status=403).message == "Status: 403"
    refused = PermissionError(13, "Permission denied", "/key.json")
    assert "/key.json" in explain_token_error(refused, url="", status=None).message


def test_an_endpoint_that_does_not_answer_is_told_in_the_same_words_each_time() -> None:
    texts = {
        explain_token_error(
            auth_exceptions.TransportError(OSError(f"<connection at {hex(at)}>")), url=URL, status=None
        ).message
        for at in range(2)
    }
    assert len(texts) == 1
    assert URL in texts.pop()


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
