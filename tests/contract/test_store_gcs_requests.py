"""Test the requests to a bucket: one conditional request for an entry of the log, and nothing that composes."""

import base64
import secrets
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import google_crc32c
import pytest
import requests

from stepkeeper.log import Log
from stepkeeper.storage.gcs import GcsStore
from stepkeeper_testing.gcs import BUCKET
from stepkeeper_testing.memory import MemoryBucket, MemoryStore

pytestmark = pytest.mark.built

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Sent:
    method: str
    path: str
    query: dict[str, list[str]]
    body: bytes

    @property
    def writes(self) -> bool:
        return self.method in ("POST", "PUT", "PATCH")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    found: list[Sent] = []
    send = requests.Session.send

    def recorded(self: requests.Session, request: requests.PreparedRequest, **options: Any) -> Any:
        url = urlsplit(request.url or "")
        sent: Any = request.body or b""
        body = sent if isinstance(sent, bytes) else b"".join(sent)
        found.append(Sent(method=request.method or "", path=url.path, query=parse_qs(url.query), body=body))
        return send(self, request, **options)

    monkeypatch.setattr(requests.Session, "send", recorded)
    return found


@pytest.fixture
def store(gcs_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsStore]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
    store = GcsStore(bucket=BUCKET, prefix=secrets.token_hex(8))
    yield store
    store.close()


def encoded(data: bytes) -> str:
    return base64.b64encode(struct.pack(">I", google_crc32c.value(data))).decode()


def test_an_entry_of_the_log_is_one_request_with_a_condition_and_a_checksum(
    store: GcsStore, sent: list[Sent]
) -> None:
    log = Log(store)
    claim = log.begin()
    for number in range(3):
        log.void(claim, "nothing to save", f"{number}/0-x")
    writes = [request for request in sent if request.writes]
    assert len(writes) == 4
    for slot, request in enumerate(writes):
        assert request.query["uploadType"] == ["multipart"]
        assert request.query["ifGenerationMatch"] == ["0"]
        assert encoded(store.read(f".stepkeeper/log/{slot:08d}.json")).encode() in request.body
    assert not [request for request in sent if request.method == "DELETE"]


def test_a_long_log_is_opened_with_few_requests(store: GcsStore, sent: list[Sent]) -> None:
    """Two pages of names, the newest entry and the one with its index, those between, and a look whether more came."""
    bucket = MemoryBucket()
    log = Log(MemoryStore(bucket))
    claim = log.begin()
    for step in range(1_599):
        log.void(claim, "nothing to save", f"{step}/0-x")
    with ThreadPoolExecutor(16) as threads:
        won = threads.map(lambda each: store.put_if_absent(*each), bucket.objects.items())
        assert sum(won) == 1_600
    sent.clear()
    assert Log(store).open() == log.state
    listings = [request for request in sent if "maxResults" in request.query]
    assert len(listings) == 2
    assert len(sent) - len(listings) == 17


def test_nothing_is_put_together_copied_or_changed_by_the_server(store: GcsStore, sent: list[Sent]) -> None:
    Log(store).begin()
    for size_mib in (20, 40):
        store.write(f"1/0-a/large-{size_mib}", [secrets.token_bytes(MIB) * size_mib])
    store.write("1/0-a/small", [b"x"])
    store.read("1/0-a/large-20", MIB, MIB)
    store.list("")
    store.delete("1/0-a/small")
    for request in sent:
        assert not {"compose", "rewriteTo", "copyTo"} & set(request.path.split("/")), request.path
        assert not {"uploads", "uploadId", "partNumber"} & set(request.query), request.query
        assert request.method != "PATCH"


@pytest.mark.parametrize(("size_mib", "kind"), [(9, "multipart"), (33, "resumable")])
def test_bulk_data_is_sent_with_a_condition_and_a_checksum_of_the_whole(
    store: GcsStore, sent: list[Sent], size_mib: int, kind: str
) -> None:
    data = secrets.token_bytes(MIB) * size_mib
    store.write("1/0-a/large", [data[:MIB], memoryview(data)[MIB:]])
    writes = [request for request in sent if request.writes]
    assert writes[0].query["uploadType"] == [kind]
    assert writes[0].query["ifGenerationMatch"] == ["0"]
    assert encoded(data).encode() in writes[0].body
    assert len(writes) == (1 if kind == "multipart" else 2), "one request has all the bytes"


@pytest.mark.parametrize("size_mib", [9, 33])
def test_bulk_data_is_sent_from_where_it_is(store: GcsStore, size_mib: int) -> None:
    data = memoryview(secrets.token_bytes(MIB) * size_mib)
    store.write("warm", [data[:MIB]])
    tracemalloc.start()
    try:
        store.write("1/0-a/large", [data[:MIB], data[MIB:]])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * MIB
    assert store.list("1/")[0].size_bytes == data.nbytes
