"""Get tokens of Google Cloud before they are needed.

Google's client gets them inside of gRPC, which calls whatever goes wrong there UNAVAILABLE: nobody could tell
credentials that are refused from a network that is down for a moment.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import google.auth
import google.auth.credentials
import google.auth.transport.grpc
import google.auth.transport.requests
from google.auth import environment_vars
from google.oauth2 import service_account

from stepkeeper_operator.cloud_tpu.cloud import CloudTPUError, ErrorKind
from stepkeeper_operator.cloud_tpu.errors import TOKEN_ERRORS, explain_token_error

__all__ = ["Authorization"]

_log = logging.getLogger(__name__)

Headers: TypeAlias = tuple[tuple[str, str], ...]

_SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)
_HTTP_TIMEOUT_S: Final = 10.0
_WAIT_S: Final = 30.0
_ASK_AGAIN_S: Final = {ErrorKind.TRANSIENT: 5.0, ErrorKind.CREDENTIALS: 60.0}
"""Seconds for which an error answers for all who ask. A changed file is taken up at once."""

_CHANGED: Final = CloudTPUError(
    ErrorKind.TRANSIENT, "UNAVAILABLE", "the file of credentials has just changed"
)


class Authorization:
    """Hold this process's credentials, from a mounted file or Workload Identity, and a valid token of them."""

    def __init__(self, host: str) -> None:
        """Prepare to authorize requests to an API's host."""
        self._service_url = f"https://{host}/"
        self._credentials: Any = None
        self._headers: Headers = ()
        self._file: _File | None = None
        self._refusal: tuple[float, CloudTPUError] | None = None
        """When there was no token, by the monotonic clock, and the error that says why."""
        self._renewal: asyncio.Task[None] | None = None

    def tell_headers(self, _context: object, callback: Callable[[Headers, Exception | None], None]) -> None:
        """Give gRPC the headers that `renew` got. gRPC calls it for each request, in a thread of its own."""
        callback(self._headers, None)

    async def renew(self) -> None:
        """See to it that the next request carries a valid token.

        Raises:
            CloudTPUError: There is no token: there are no credentials, they are refused, or nobody answers.
        """
        file = _find_file()
        if file != self._file:
            self._file, self._refusal, self._credentials, self._headers = file, None, None, ()
        if self._state() is google.auth.credentials.TokenState.FRESH:
            return
        if not self._is_refused():
            await self._join_renewal()
        if self._state() is google.auth.credentials.TokenState.INVALID:
            raise self._refusal[1] if self._refusal is not None else _CHANGED

    async def close(self) -> None:
        """Wait no longer for a token that is being asked for."""
        if self._renewal is not None:
            self._renewal.cancel()

    def _state(self) -> Any:
        if self._credentials is None:
            return google.auth.credentials.TokenState.INVALID
        return self._credentials.token_state

    def _is_refused(self) -> bool:
        if self._refusal is None:
            return False
        at, error = self._refusal
        return time.monotonic() - at < _ASK_AGAIN_S[error.kind]

    async def _join_renewal(self) -> None:
        """Wait for the renewal that goes on, or begin one. There is never more than one thread that hangs."""
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
        renewal = self._renewal
        await asyncio.wait({renewal}, timeout=_WAIT_S)
        if not renewal.done():
            raise CloudTPUError(ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED", "no token in time")
        renewal.result()

    async def _renew(self) -> None:
        file, credentials, request = self._file, self._credentials, _TokenRequest()
        headers, refusal = self._headers, None
        try:
            # These read files and ask servers, and have no asynchronous form.
            if credentials is None:
                credentials = await asyncio.to_thread(_load_credentials, request)
            headers = await asyncio.to_thread(_get_headers, credentials, request, self._service_url)
        except TOKEN_ERRORS as error:
            refusal = explain_token_error(error, url=request.url, status=request.status)
            _log.warning("no token for the Cloud TPU API", extra={"error": str(refusal)})
        if file == self._file:
            self._credentials, self._headers = credentials, headers
            self._refusal = None if refusal is None else (time.monotonic(), refusal)


class _Context(NamedTuple):
    """The part of grpc.AuthMetadataContext that google's plugin reads."""

    service_url: str
    method_name: str


class _TokenRequest:
    """Send the HTTP requests for a token, with a time limit, and remember the last answer."""

    def __init__(self) -> None:
        self._request = google.auth.transport.requests.Request()
        self.url = ""
        self.status: int | None = None
        """Status of the last answer; None: there was none."""

    def __call__(self, url: str, *args: Any, timeout: float | None = None, **options: Any) -> Any:
        self.url, self.status = url, None
        answer = self._request(url, *args, timeout=timeout or _HTTP_TIMEOUT_S, **options)
        self.status = answer.status
        return answer


@dataclass(frozen=True, slots=True)
class _File:
    """A file of credentials as it was: after any change, another one."""

    path: str
    inode: int
    size: int
    changed_ns: int


def _find_file() -> _File | None:
    """Find the file that the environment names. None: it names none, or there is none."""
    path = os.environ.get(environment_vars.CREDENTIALS)
    if not path:
        return None
    try:
        known = Path(path).stat()
    except OSError:
        return None
    return _File(path, known.st_ino, known.st_size, known.st_mtime_ns)


def _load_credentials(request: _TokenRequest) -> Any:
    # With scopes it would ask another API for the project's name, which nobody needs.
    found, _ = google.auth.default(request=request)
    credentials = google.auth.credentials.with_scopes_if_required(found, _SCOPES)
    if isinstance(credentials, service_account.Credentials):  # such a key signs its tokens by itself
        return credentials.with_always_use_jwt_access(True)
    return credentials


def _get_headers(credentials: Any, request: _TokenRequest, service_url: str) -> Headers:
    """Return the headers of a request, with a valid token."""
    headers: list[tuple[str, str]] = []
    plugin = google.auth.transport.grpc.AuthMetadataPlugin(credentials, request)
    plugin(_Context(service_url, ""), lambda made, _: headers.extend(made))
    return tuple(headers)
