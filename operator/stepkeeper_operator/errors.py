"""Define all errors that the operator raises.

OperatorError
├── GenerationError (ValueError)        the CRD can't be generated from the types
├── ApiError (OSError)                  the API server rejected a request
│   ├── AlreadyExistsError              another object has that name
│   ├── ConflictError                   the object's uid or version differs from the one that was read
│   └── InvalidObjectError              validation or admission rejected the object
├── CertificateError (ValueError)       the Secret of the endpoint's certificate is unusable; a person has to act
├── ReportRefusedError                  a pod's report is rejected; carries the HTTP status
└── LeaseLostError                      another operator may act now
"""

import json
from http import HTTPStatus

__all__ = [
    "AlreadyExistsError",
    "ApiError",
    "CertificateError",
    "ConflictError",
    "GenerationError",
    "InvalidObjectError",
    "LeaseLostError",
    "OperatorError",
    "ReportRefusedError",
    "api_error",
]


class OperatorError(Exception):
    """Base of all the operator's errors."""


class GenerationError(OperatorError, ValueError):
    """A type has no structural schema, or a rule names a field that doesn't exist."""


class ApiError(OperatorError, OSError):
    """The API server answered a request with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_permanent(self) -> bool:
        """True if the same request fails until a person changes something: a permission or a webhook."""
        temporary = self.status in {HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
        rejected = HTTPStatus.BAD_REQUEST <= self.status < HTTPStatus.INTERNAL_SERVER_ERROR and not temporary
        # If a webhook can't be called, the status is 500.
        return rejected or "webhook" in str(self)


class AlreadyExistsError(ApiError):
    """Another object has that name."""


class ConflictError(ApiError):
    """The object's uid or resourceVersion differs from that in the request."""


class InvalidObjectError(ApiError):
    """Validation or an admission webhook rejected the object: the same request would fail again."""


class CertificateError(OperatorError, ValueError):
    """The Secret of the endpoint's certificate is damaged, or not the operator's own. It is not changed."""


class ReportRefusedError(OperatorError):
    """The endpoint rejects a report; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LeaseLostError(OperatorError):
    """This operator must stop writing: another one may act."""


def api_error(status: int, body: bytes, method: str, path: str) -> ApiError:
    """Convert an error answer of the API server to an exception."""
    try:
        answer = json.loads(body)
        reason, text = str(answer.get("reason", "")), str(answer.get("message", ""))
    except (ValueError, AttributeError):  # not JSON, or not an object: for example a proxy's page
        reason, text = "", body[:200].decode(errors="replace")
    message = " ".join(part for part in (f"{method} {path}: {status}", reason, text) if part)
    if status == 409:
        kind: type[ApiError] = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
        return kind(status, message)
    # A missing permission is a 403 too. Only the text of an admission webhook names admission.
    if status in {400, 422} or (status == 403 and "admission" in text):
        return InvalidObjectError(status, message)
    return ApiError(status, message)
