"""Be the metadata server of a machine, for tests of what a training does when the cloud announces something."""

import hashlib
import threading
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

_PREFIX: Final = "/computeMetadata/v1/instance/"
_FLAVOR: Final = ("Metadata-Flavor", "Google")
_QUIET: Final = '{ "error": "no notifications have been received yet, try again later" }'
_NOTHING: Final = {"preempted": "FALSE", "maintenance-event": "NONE"}


class FakeMetadataServer:
    """Serve keys below instance/ on this machine. As on the real one, a question can wait until a key changes."""

    def __init__(
        self, port: int = 0, values: Mapping[str, str] = _NOTHING, address: str = "127.0.0.1"
    ) -> None:
        """Listen; `with` starts to answer.

        Args:
            port: The TCP port; 0 takes a free one.
            values: The first values of the keys; a key that isn't there is answered with 404.
            address: The address to listen on.

        """
        self.requests: list[str] = []
        """The paths that were asked for."""

        self.failing = 0
        """How many of the next questions are answered with 503."""

        self.quiet: set[str] = set()
        """Keys of which the server has heard nothing yet: they are answered with 503, too."""

        self._values = dict(values)
        self._changed = threading.Condition()
        self._closing = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(*server._get(self.path, self.headers.get(_FLAVOR[0])))

            def do_PUT(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                server.set(urlsplit(self.path).path.removeprefix(_PREFIX), text)
                self._answer(HTTPStatus.OK, "")

            @override
            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

            def _answer(self, status: HTTPStatus, text: str) -> None:
                data = text.encode()
                with suppress(OSError):  # who asked may have stopped to wait
                    self.send_response(status)
                    self.send_header(*_FLAVOR)
                    self.send_header("ETag", _etag(text))
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        self._http = ThreadingHTTPServer((address, port), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def host(self) -> str:
        """The value for GCE_METADATA_HOST."""
        address, port = self._http.server_address[:2]
        return f"{address!s}:{port}"

    def set(self, key: str, text: str) -> None:
        """Change a key; whoever waits for that is answered."""
        with self._changed:
            self._values[key] = text
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, and listen no more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _get(self, path: str, flavor: str | None) -> tuple[HTTPStatus, str]:
        parts = urlsplit(path)
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        key = parts.path.removeprefix(_PREFIX)
        with self._changed:
            self.requests.append(path)
            if flavor != _FLAVOR[1]:
                return HTTPStatus.FORBIDDEN, "the header Metadata-Flavor: Google is missing"
            if self.failing > 0:
                self.failing -= 1
                return HTTPStatus.SERVICE_UNAVAILABLE, "try again"
            if key in self.quiet:
                return HTTPStatus.SERVICE_UNAVAILABLE, _QUIET
            if asked.get("wait_for_change") == "true":
                self._changed.wait_for(
                    lambda: self._closing or _etag(self._values.get(key, "")) != asked.get("last_etag"),
                    float(asked.get("timeout_sec", 60)),
                )
            value = self._values.get(key)
        return (HTTPStatus.NOT_FOUND, "no such key") if value is None else (HTTPStatus.OK, value)


def _etag(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
