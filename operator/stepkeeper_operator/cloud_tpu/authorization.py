"""Get tokens of Google Cloud before each request.

Google's client gets them inside gRPC, which reports every failure as UNAVAILABLE: rejected credentials would look the
same as a short network outage.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import google.auth
import google.auth.credentials
import google.auth.transport.requests
from google.auth import environment_vars
from google.oauth2 import service_account

from stepkeeper_operator.cloud_tpu.cloud import CloudTPUError
from stepkeeper_operator.cloud_tpu.errors import TOKEN_ERRORS, explain_token_error

__all__ = ["Authorization"]

_log = logging.getLogger(__name__)

Headers: TypeAlias = tuple[tuple[str, str], ...]
_State: TypeAlias = google.auth.credentials.TokenState

_SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)
_HTTP_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 15.0
"""Seconds for which an error is reused for all requests. A changed credentials file is read at once."""


class Authorization:
    """Hold this process's credentials, from a mounted file or Workload Identity, and a valid token."""

    def __init__(self, host: str) -> None:
        """Prepare to authorize requests to an API's host."""
        self._service_url = f"https://{host}/"
        self._lock = asyncio.Lock()
        self._credentials: Any = None
        self._headers: Headers = ()
        self._file: tuple[object, ...] | None = None
        """The version of the credentials file that was last seen."""
        self._failure: tuple[float, CloudTPUError] | None = None
        """Monotonic time of the last failure to get a token, and the error."""

    def provide_headers(
        self, _context: object, callback: Callable[[Headers, Exception | None], None]
    ) -> None:
        """Give gRPC the headers from `renew`. gRPC calls it for each request, in its own thread."""
        callback(self._headers, None)

    async def renew(self) -> None:
        """Get a valid token for the next request. Concurrent callers share it.

        Raises:
            CloudTPUError: There is no token: no credentials, rejected credentials, or no answer.
        """
        async with self._lock:
            file = _find_file()
            if file != self._file:
                self._file, self._failure, self._credentials = file, None, None
            if self._get_state() is _State.FRESH:
                return
            if self._failure is None or time.monotonic() - self._failure[0] >= _RETRY_S:
                # It reads files and sends requests, and has no asynchronous form.
                error = await asyncio.to_thread(self._get_token)
                self._failure = None if error is None else (time.monotonic(), error)
            # A token that expires soon (STALE) is still valid: the request is sent with it.
            if self._failure is not None and self._get_state() is _State.INVALID:
                raise self._failure[1]

    def _get_state(self) -> _State:
        state: _State = _State.INVALID if self._credentials is None else self._credentials.token_state
        return state

    def _get_token(self) -> CloudTPUError | None:
        """Load the credentials, and get headers with a token. Return the error if there is none."""
        request, headers = _TokenRequest(), dict[str, str]()
        try:
            if self._credentials is None:
                self._credentials = _load_credentials(request)
            self._credentials.before_request(request, "POST", self._service_url, headers)
        except TOKEN_ERRORS as error:
            explained = explain_token_error(error, url=request.url, status=request.status)
            _log.warning("no token for the Cloud TPU API", extra={"error": str(explained)})
            return explained
        self._headers = tuple(headers.items())
        return None


class _TokenRequest:
    """Send the HTTP requests for a token with a time limit, and remember the last answer."""

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


def _find_file() -> tuple[object, ...] | None:
    """Identify the version of the file that the environment names. None: there is none."""
    path = os.environ.get(environment_vars.CREDENTIALS)
    if not path:
        return None
    try:
        known = Path(path).stat()
    except OSError:
        return None
    return path, known.st_ino, known.st_size, known.st_mtime_ns


def _load_credentials(request: _TokenRequest) -> Any:
    # Called with the scopes, `default` would also ask another API for the project's name, which isn't needed.
    found, _ = google.auth.default(request=request)
    credentials = google.auth.credentials.with_scopes_if_required(found, _SCOPES)
    if isinstance(credentials, service_account.Credentials):  # such a key can sign its own tokens
        return credentials.with_always_use_jwt_access(True)
    return credentials
