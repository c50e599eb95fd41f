"""Cloud Storage through a proxy that loses requests and answers: what is done stays done, and is known to be."""

import http.client
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typing_extensions import override

from stepcluster import binaries
from stepkeeper.errors import (
    MissingObjectError,
    ObjectExistsError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import Log
from stepkeeper.storage import gcs
from stepkeeper.storage.gcs import GcsStore
from stepkeeper.storage.retry import Patience
from stepkeeper.testing.gcs import BUCKET, fake_gcs_server

IMPATIENT = Patience(total_s=0, sleep=lambda _: None)
LARGE = 33 * 1024 * 1024
"""Sent in two requests, of which the second can be resumed."""


@dataclass
class Proxy:
    """Forwards to the emulator; `faults` are taken one by one by requests that write."""

    target: str
    faults: list[str | int] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)
    sent_bytes: int = 0
    """Of bodies, of all requests."""

    kept: dict[str, int] = field(default_factory=dict)
    """By the path of an upload that isn't done: how many bytes came in. The emulator itself can't be asked."""

    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self, method: str) -> str | int | None:
        with self.lock:
            return self.faults.pop(0) if self.faults and method in ("POST", "PUT") else None


def handler_of(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            proxy.sent_bytes += len(body)
            fault = proxy.next_fault(self.command)
            if isinstance(fault, int):
                self.answer(fault, b'{"error":{"message":"said the proxy"}}', {})
                return
            if fault == "lost":
                self.close_connection = True
                return
            if self.headers.get("Content-Range", "").startswith("bytes */"):
                came_in = proxy.kept.get(self.path, 0)
                self.answer(308, b"", {"Range": f"bytes=0-{came_in - 1}"} if came_in else {})
                return
            connection = http.client.HTTPConnection(proxy.target, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
            if fault == "cut":
                # A server keeps what came in of an upload that can be resumed.
                body = body[: len(body) // 2]
                proxy.kept[self.path] = len(body)
                headers |= {"Content-Range": f"bytes 0-{len(body) - 1}/*", "Content-Length": str(len(body))}
            connection.request(self.command, self.path, body, headers | {"Accept-Encoding": "identity"})
            response = connection.getresponse()
            data = response.read()
            connection.close()
            proxy.answers.append((self.command, response.status))
            if fault in ("answer lost", "cut"):
                self.close_connection = True
                return
            self.answer(response.status, data, dict(response.getheaders()))

        def answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() == "location":
                    # An upload goes on through the proxy, too.
                    value = value.replace(proxy.target, self.headers["Host"])  # noqa: PLW2901  # as above
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

    return Handler


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("fake-gcs-server")
    with fake_gcs_server(binaries.ensure()["fake-gcs-server"], folder) as found:
        yield found


@pytest.fixture
def proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(urlsplit(address).netloc)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(proxy)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
        yield proxy
        server.shutdown()
        thread.join()


@pytest.fixture
def make_store(proxy: Proxy) -> Iterator[Callable[..., GcsStore]]:
    made: list[GcsStore] = []
    prefix = f"runs/{secrets.token_hex(8)}"

    def make(bucket: str = BUCKET, retry_s: float = 5.0) -> GcsStore:
        made.append(GcsStore(bucket=bucket, prefix=prefix, retry_s=retry_s))
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_a_put_whose_answer_was_lost_is_found_to_be_ours(
    proxy: Proxy, make_store: Callable[..., GcsStore]
) -> None:
    store = make_store()
    proxy.faults = ["answer lost"]
    assert not store.put_if_absent("x", b"mine")
    assert store.read("x") == b"mine"
    assert [answer for answer in proxy.answers if answer[0] == "POST"] == [("POST", 200), ("POST", 412)]


@pytest.mark.parametrize("fault", ["lost", "answer lost", 503, 429])
def test_an_append_goes_in_once(proxy: Proxy, make_store: Callable[..., GcsStore], fault: str | int) -> None:
    store = make_store()
    log = Log(store)
    proxy.faults = [fault]
    claim = log.begin()
    proxy.faults = [fault, fault]
    log.void(claim, "nothing to save", "10/0-x")
    assert [stat.path[-8:] for stat in store.list(".stepkeeper/log/")] == ["000.json", "001.json"]


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("fault", ["lost", "answer lost", 503])
def test_a_bulk_write_gets_through(
    proxy: Proxy, make_store: Callable[..., GcsStore], fault: str | int, size: int
) -> None:
    store = make_store()
    data = secrets.token_bytes(size)
    proxy.faults = [fault]
    store.write("1/x", [data])
    assert store.read("1/x") == data


def test_a_large_upload_that_was_cut_off_goes_on_from_there(
    proxy: Proxy, make_store: Callable[..., GcsStore]
) -> None:
    store = make_store()
    data = secrets.token_bytes(LARGE)
    proxy.faults = ["none", "cut"]
    store.write("1/x", [data[:1000], memoryview(data)[1000:]])
    assert store.read("1/x") == data
    assert LARGE * 1.49 < proxy.sent_bytes < LARGE * 1.51
    assert [status for method, status in proxy.answers if method == "PUT"] == [308, 200]


def test_a_large_upload_that_was_forgotten_begins_again(
    proxy: Proxy, make_store: Callable[..., GcsStore]
) -> None:
    store = make_store()
    data = secrets.token_bytes(LARGE)
    proxy.faults = ["none", 410, "none", 404]
    store.write("1/x", [data])
    assert store.read("1/x") == data


def test_of_a_bulk_write_whose_answer_was_lost_other_bytes_are_no_success(
    proxy: Proxy, make_store: Callable[..., GcsStore]
) -> None:
    store = make_store()
    store.write("1/x", [b"theirs"])
    proxy.faults = ["lost"]
    with pytest.raises(ObjectExistsError, match="1/x exists with other bytes"):
        store.write("1/x", [b"ours"])


def test_a_store_that_never_answers_is_transient_and_an_append_unknown(
    proxy: Proxy, make_store: Callable[..., GcsStore]
) -> None:
    store = make_store(retry_s=0.1)
    log = Log(store, patience=IMPATIENT)
    claim = log.begin()
    proxy.faults = [503] * 20
    with pytest.raises(TransientStorageError, match="1/x"):
        store.write("1/x", [b"1"])
    with pytest.raises(UnknownOutcomeError):
        log.void(claim, "nothing to save", "10/0-x")
    proxy.faults = []
    assert log.settle() is None
    assert log.state.tail == 1


def test_a_server_that_is_not_there_is_transient(
    make_store: Callable[..., GcsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(TransientStorageError, match="x"):
        make_store(retry_s=0.1).read("x")


def test_permission_denied_says_which_role(proxy: Proxy, make_store: Callable[..., GcsStore]) -> None:
    proxy.faults = [403]
    with pytest.raises(StorageError, match=r"not allowed.*roles/storage\.objectUser"):
        make_store().put_if_absent("x", b"1")


@pytest.mark.parametrize("ask", [lambda store: store.put_if_absent("x", b"1"), lambda store: store.read("x")])
def test_a_bucket_that_is_not_there_is_no_missing_object(
    make_store: Callable[..., GcsStore], ask: Callable[[GcsStore], object]
) -> None:
    store = make_store("no-such-bucket")
    with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'") as raised:
        ask(store)
    assert not isinstance(raised.value, MissingObjectError | TransientStorageError)


@pytest.mark.parametrize("size", [10, LARGE])
def test_bytes_that_differ_from_their_checksum_are_refused(
    make_store: Callable[..., GcsStore], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    store = make_store()
    monkeypatch.setattr(gcs, "crc32c_of_parts", lambda _: 1)
    with pytest.raises(StorageError):
        store.write("1/x", [b"1" * size])
    assert store.list("1/") == []
