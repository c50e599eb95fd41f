"""A server between a client and an emulator of Cloud Storage that loses and refuses what it is told to."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from typing_extensions import override

Fault = int | Literal["none", "lost", "answer lost", "cut", "stuck"]
"""A status to answer with and do nothing else, or what becomes of the request."""

STUCK_S: Final = 60.0
_ABOUT_BYTES: Final = 600
"""Of an upload's body: its object's name is there."""


@dataclass
class Proxy:
    """`faults` are taken one by one by requests that write; about all others `rule` is asked: method, what for."""

    target: str
    faults: list[Fault] = field(default_factory=list)
    rule: Callable[[str, str], Fault] = field(default=lambda method, about: "none")
    answers: list[tuple[str, int]] = field(default_factory=list)
    sent_bytes: int = 0
    """Of bodies, of all requests."""

    kept: dict[str, int] = field(default_factory=dict)
    """By the path of an upload that isn't done: how many bytes came in. The emulator itself can't be asked."""

    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    unstuck: threading.Event = field(default_factory=threading.Event)

    def next_fault(self, method: str, about: str) -> Fault:
        with self.lock:
            if self.faults and method in ("POST", "PUT"):
                return self.faults.pop(0)
        return self.rule(method, about)


@contextmanager
def faulty(target: str) -> Iterator[Proxy]:
    """The proxy, in a thread of this process, in front of the emulator at `target`."""
    proxy = Proxy(urlsplit(target).netloc)
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(proxy)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        proxy.address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield proxy
        finally:
            proxy.unstuck.set()
            server.shutdown()
            thread.join()


def _handler_of(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.proxy.sent_bytes += len(body)
        about = unquote(self.path) + body[:_ABOUT_BYTES].decode("latin1")
        match self.proxy.next_fault(self.command, about):
            case int() as status:
                self._refuse(status)
            case "lost":
                self.close_connection = True
            case "stuck":
                self.proxy.unstuck.wait(STUCK_S)
                self.close_connection = True
            case "cut":
                # A server keeps what came in of an upload that can be resumed.
                half = body[: len(body) // 2]
                self.proxy.kept[self.path] = len(half)
                kept = {"Content-Range": f"bytes 0-{len(half) - 1}/*", "Content-Length": str(len(half))}
                self._forwarded(half, kept)
                self.close_connection = True
            case fault:
                self._pass_on(body, fault)

    def _pass_on(self, body: bytes, fault: str) -> None:
        if self.headers.get("Content-Range", "").startswith("bytes */"):
            came_in = self.proxy.kept.get(self.path, 0)
            self._answer(308, b"", {"Range": f"bytes=0-{came_in - 1}"} if came_in else {})
            return
        status, data, headers = self._forwarded(body, {})
        if fault == "answer lost":
            self.close_connection = True
        else:
            self._answer(status, data, headers)

    def _forwarded(self, body: bytes, changed: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection(self.proxy.target, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        connection.request(self.command, self.path, body, headers | changed | {"Accept-Encoding": "identity"})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        self.proxy.answers.append((self.command, response.status))
        return response.status, data, dict(response.getheaders())

    def _refuse(self, status: int) -> None:
        self._answer(status, b'{"error":{"message":"said the proxy"}}', {})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() == "location":
                # An upload goes on through the proxy, too.
                value = value.replace(self.proxy.target, self.headers["Host"])  # noqa: PLW2901  # as above
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = forward  # noqa: N815  # the base class's names

    @override
    def log_message(self, format: str, *args: object) -> None:  # the base class's name
        """Say nothing."""
