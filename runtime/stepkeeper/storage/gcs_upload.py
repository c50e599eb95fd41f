"""Upload bulk data into a bucket: views of the caller's memory go to the socket, in one request or several."""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

import requests
from google.api_core import exceptions as api_exceptions
from google.api_core.retry import Retry
from google.auth.transport.requests import AuthorizedSession
from google.cloud.storage.retry import DEFAULT_RETRY

from stepkeeper.storage.base import Buffer, flat_view
from stepkeeper.storage.moved import moved
from stepkeeper.storage.retry import Patience

__all__ = ["CALL_TIMEOUT_S", "Place", "upload"]

CALL_TIMEOUT_S: Final = (10.0, 60.0)
"""The seconds to connect, and the seconds for each piece that is sent or between two pieces of an answer."""

_RESUMABLE_BYTES: Final = 32 * 1024 * 1024
"""The size above which sending everything again costs more than a second request."""

_PIECE_BYTES: Final = 256 * 1024
"""The bytes that are passed to the socket at once. A send that takes longer than the timeout is stuck."""

_KIND: Final = "application/octet-stream"
_DONE: Final = (200, 201)
_RESUME: Final = 308
_GONE: Final = (404, 410)
"""Status codes for an upload that is complete, one to continue, and one that the server doesn't know any more."""

_RANGE: Final = re.compile(r"bytes=0-([0-9]+)")
_is_transient: Final = DEFAULT_RETRY._predicate  # noqa: SLF001  # what the library itself retries


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place that an object is uploaded to, and the session for the upload."""

    session: AuthorizedSession
    endpoint: str
    bucket: str
    name: str

    def url(self, upload_type: str) -> str:
        query = urlencode({"uploadType": upload_type, "ifGenerationMatch": "0", "fields": "generation"})
        return f"{self.endpoint}/upload/storage/v1/b/{quote(self.bucket, safe='')}/o?{query}"


def upload(place: Place, parts: Sequence[Buffer], crc32c: str, *, retry: Retry, patience: Patience) -> None:
    """Upload `parts`, joined, as the object. The server compares them with `crc32c`, in base64.

    `retry` retries one request, `patience` an upload that makes no progress; any progress restarts it. Raises
    PreconditionFailed if there is an object already, perhaps our own from a try without an answer, or
    NotFound without a bucket.
    """
    body = _Body([view for view in map(flat_view, parts) if view.nbytes])
    resource = {"name": place.name, "crc32c": crc32c, "contentType": _KIND}
    if len(body) < _RESUMABLE_BYTES:
        retry(_upload_at_once)(place, body, resource)
    else:
        _upload_resumably(place, body, resource, retry, patience)


class _Body:
    """The body that requests sends without a copy: pieces of the parts, from an offset on. It can be iterated again."""

    def __init__(self, parts: Sequence[memoryview], start: int = 0) -> None:
        self._parts = parts
        self._start = start
        self._size_bytes = sum(part.nbytes for part in parts)

    def __len__(self) -> int:
        return self._size_bytes - self._start

    def __iter__(self) -> Iterator[memoryview]:
        skipped = self._start
        for part in self._parts:
            for first in range(min(skipped, part.nbytes), part.nbytes, _PIECE_BYTES):
                piece = part[first : first + _PIECE_BYTES]
                yield piece
                # The connection has taken it, so the server is receiving the pieces before it.
                moved.note(piece.nbytes)
            skipped = max(skipped - part.nbytes, 0)

    @property
    def parts(self) -> Sequence[memoryview]:
        return self._parts

    def since(self, offset: int) -> "_Body":
        return _Body(self._parts, offset)


def _upload_at_once(place: Place, body: _Body, resource: Mapping[str, str]) -> None:
    boundary = secrets.token_hex(16)
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
    head += f"--{boundary}\r\nContent-Type: {_KIND}\r\n\r\n"
    whole = [memoryview(head.encode()), *body.parts, memoryview(f"\r\n--{boundary}--\r\n".encode())]
    kind = {"Content-Type": f"multipart/related; boundary={boundary}"}
    _check_status(_send(place, "POST", place.url("multipart"), _Body(whole), kind))


def _upload_resumably(
    place: Place, body: _Body, resource: Mapping[str, str], retry: Retry, patience: Patience
) -> None:
    """Upload all in one request; after a failure, upload the bytes that the server lacks in another one."""
    session: str | None = None
    offset = furthest = 0
    pauses_s = patience.pauses_s()
    while True:
        failure: Exception = api_exceptions.ServiceUnavailable("the upload makes no progress")
        try:
            if session is None:
                session, offset = retry(_begin_session)(place, len(body), resource), 0
            headers = {"Content-Range": f"bytes {offset}-{len(body) - 1}/{len(body)}", "Content-Type": _KIND}
            answer = _send(place, "PUT", session, body.since(offset), headers)
            received = _parse_progress(answer, len(body))
        except Exception as error:
            # `_begin_session` was retried already.
            if session is None or not _is_transient(error):
                raise
            failure = error
            received = retry(_query_progress)(place, session, len(body))
        if received == len(body):
            return
        if received is None:
            session = None  # begin again
        else:
            # The server may have lost bytes, too: continue after those that it reports.
            offset = received
            if received > furthest:
                furthest, pauses_s = received, patience.pauses_s()
                continue
        pause_s = next(pauses_s, None)
        if pause_s is None:
            raise failure
        patience.sleep(pause_s)


def _begin_session(place: Place, size_bytes: int, resource: Mapping[str, str]) -> str:
    """Begin a resumable upload, and return its URL."""
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    headers |= {"X-Upload-Content-Length": str(size_bytes), "X-Upload-Content-Type": _KIND}
    answer = _check_status(
        _send(place, "POST", place.url("resumable"), json.dumps(resource).encode(), headers)
    )
    return answer.headers["Location"]


def _query_progress(place: Place, session: str, size_bytes: int) -> int | None:
    answer = _send(place, "PUT", session, b"", {"Content-Range": f"bytes */{size_bytes}"})
    return _parse_progress(answer, size_bytes)


def _parse_progress(answer: requests.Response, size_bytes: int) -> int | None:
    """Return how many bytes the server has; None if it no longer knows the upload. Raises for any other answer."""
    if answer.status_code in _GONE:
        return None
    if answer.status_code != _RESUME:
        _check_status(answer)
        return size_bytes
    found = _RANGE.fullmatch(answer.headers.get("Range", ""))
    return int(found[1]) + 1 if found else 0


def _send(
    place: Place, method: str, url: str, body: "_Body | bytes", headers: Mapping[str, str]
) -> requests.Response:
    answer: requests.Response = place.session.request(
        method,
        url,
        data=body,
        headers=dict(headers),
        timeout=CALL_TIMEOUT_S,
        # Uploads are never redirected; 308 means something else here.
        allow_redirects=False,
    )
    return answer


def _check_status(answer: requests.Response) -> requests.Response:
    if answer.status_code not in _DONE:
        raise api_exceptions.from_http_response(answer)
    return answer
