"""Convert errors of Google's client to `CloudTPUError`."""

from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final

import grpc
from google.api_core import exceptions as api_exceptions
from google.auth import exceptions as auth_exceptions
from google.rpc import error_details_pb2

from stepkeeper_operator.cloud_tpu.cloud import CloudTPUError, ErrorKind

__all__ = ["EXPECTED", "TOKEN_ERRORS", "explain_error", "explain_status", "explain_token_error"]

EXPECTED: Final[tuple[type[Exception], ...]] = (api_exceptions.GoogleAPIError, grpc.RpcError, TimeoutError)
"""Errors that a request of the client can raise. Any other is a bug in the operator."""

TOKEN_ERRORS: Final[tuple[type[Exception], ...]] = (auth_exceptions.GoogleAuthError, OSError, ValueError)
"""Errors of Google's auth library: for unreadable files and some malformed ones, it raises Python's own."""

_KINDS: Final = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.QUOTA,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.TERMINAL,
    grpc.StatusCode.OUT_OF_RANGE: ErrorKind.TERMINAL,
    grpc.StatusCode.UNIMPLEMENTED: ErrorKind.TERMINAL,
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind.TERMINAL,
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind.CREDENTIALS,
    grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: ErrorKind.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind.BUSY,
    grpc.StatusCode.ABORTED: ErrorKind.BUSY,
}
"""Every other code is transient: the request itself may be valid."""

_RATE_LIMIT: Final = "RATE_LIMIT_EXCEEDED"
"""The reason for too many requests. A lack of machines has the same code, RESOURCE_EXHAUSTED, but another reason."""

_NO_ANSWER: Final = "UNAVAILABLE"
_TEMPORARY: Final = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}


def explain_error(error: Exception) -> CloudTPUError:
    """Convert one of `EXPECTED`."""
    if isinstance(error, api_exceptions.GoogleAPICallError):
        return _explain_call(error)
    if isinstance(error, grpc.RpcError):
        code = error.code() if hasattr(error, "code") else None
        details = error.details() if hasattr(error, "details") else str(error)
        name = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
        return CloudTPUError(_KINDS.get(code, ErrorKind.TRANSIENT), name, str(details))
    if isinstance(error, TimeoutError):
        return CloudTPUError(ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED", "no answer in time")
    return CloudTPUError(ErrorKind.TRANSIENT, "UNKNOWN", str(error))


def explain_token_error(error: Exception, *, url: str, status: int | None) -> CloudTPUError:
    """Convert an error from a request for a token.

    Args:
        error: One of `TOKEN_ERRORS`.
        url: The address of the last HTTP request; empty: there was none.
        status: The HTTP status of its answer; None: there was no answer.
    """
    message = _find_message(error)
    if isinstance(error, auth_exceptions.DefaultCredentialsError):
        return CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", message)
    if url and status is None:  # leave out its message: it contains memory addresses, and differs each time
        text = f"no answer from {url} to a request for a token"
        return CloudTPUError(ErrorKind.TRANSIENT, _NO_ANSWER, text)
    transient = status is not None and (status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _TEMPORARY)
    if transient or getattr(error, "retryable", False):
        return CloudTPUError(ErrorKind.TRANSIENT, _NO_ANSWER, f"no token from {url}: {message}")
    return CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", message)


def explain_status(code: int, message: str) -> CloudTPUError:
    """Convert a google.rpc.Status, as a failed operation has it."""
    known = next((status for status in grpc.StatusCode if status.value[0] == code), None)
    name = "UNKNOWN" if known is None else known.name
    return CloudTPUError(_KINDS.get(known, ErrorKind.TRANSIENT), name, message)


def _find_message(error: BaseException) -> str:
    """Return the message of an auth library error, without the causes and whole answers in its arguments."""
    if isinstance(error, OSError):
        return str(error)
    first = error.args[0] if error.args else ""
    return _find_message(first) if isinstance(first, BaseException) else str(first) or type(error).__name__


def _explain_call(error: api_exceptions.GoogleAPICallError) -> CloudTPUError:
    code = error.grpc_status_code
    kind = _KINDS.get(code, ErrorKind.TRANSIENT)
    if kind is ErrorKind.QUOTA and error.reason == _RATE_LIMIT:
        kind = ErrorKind.TRANSIENT
    name = code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
    return CloudTPUError(kind, name, "; ".join((str(error.message), *_describe_details(error.details))))


def _describe_details(details: Iterable[Any]) -> Iterator[str]:
    """Yield one line for each detail that adds to the message: exhausted quotas, wrong fields, reasons."""
    for detail in details:
        match detail:
            case error_details_pb2.QuotaFailure() | error_details_pb2.PreconditionFailure():
                yield from (f"{each.subject}: {each.description}" for each in detail.violations)
            case error_details_pb2.BadRequest():
                yield from (f"{wrong.field}: {wrong.description}" for wrong in detail.field_violations)
            case error_details_pb2.ErrorInfo():
                facts = ", ".join(f"{key}={value}" for key, value in sorted(detail.metadata.items()))
                yield f"{detail.reason} ({facts})" if facts else detail.reason
            case _:
                pass  # help links, stack traces, retry delays: they add nothing to the message
