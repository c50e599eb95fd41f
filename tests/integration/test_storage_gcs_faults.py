"""Cloud Storage through a proxy that loses requests and answers: what is done stays done, and is known to be."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_faults.proxy import Fault, Proxy, faulty

from stepcluster import binaries
from stepkeeper.log import Log
from stepkeeper.storage.gcs import GcsStore
from stepkeeper_testing.gcs import BUCKET, fake_gcs_server

LARGE = 33 * 1024 * 1024
"""Sent in two requests, of which the second can be resumed."""


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    program = binaries.ensure()["fake-gcs-server"]
    with fake_gcs_server(program, tmp_path) as address, faulty(address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.address)
        yield proxy


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


@pytest.mark.parametrize("fault", ["lost", "answer lost", 503, 429])
def test_an_append_goes_in_once(proxy: Proxy, make_store: Callable[..., GcsStore], fault: Fault) -> None:
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
    proxy: Proxy, make_store: Callable[..., GcsStore], fault: Fault, size: int
) -> None:
    store = make_store()
    data = secrets.token_bytes(size)
    proxy.faults = [fault]
    store.write("1/x", [data])
    assert store.read("1/x") == data


def test_a_write_that_gets_stuck_is_sent_again(
    proxy: Proxy, make_store: Callable[..., GcsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper.storage.gcs_upload.CALL_TIMEOUT_S", (10.0, 2.0))
    store = make_store(retry_s=20.0)
    proxy.faults = ["stuck"]
    store.write("1/x", [b"elements"])
    assert store.read("1/x") == b"elements"


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
