"""Cloud Storage through a proxy that loses requests and answers: what is done stays done, and is known to be."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_faults.proxy import Fault, Proxy, faulty

from stepcluster import binaries
from stepkeeper.errors import (
    ObjectExistsError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import Log
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.gcs import GcsStore
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.gcs import BUCKET, fake_gcs_server

IMPATIENT = Patience(total_s=0, sleep=lambda _: None)
LARGE = 33 * 1024 * 1024
"""Sent in two requests, of which the second can be resumed."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("fake-gcs-server")
    with fake_gcs_server(binaries.ensure()["fake-gcs-server"], folder) as found:
        yield found


@pytest.fixture
def proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with faulty(address) as proxy:
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


@pytest.mark.parametrize("fault", ["flipped", "halved", "emptied"])
def test_entries_that_go_bad_on_the_way_are_read_again_over_other_connections(
    proxy: Proxy, make_store: Callable[..., GcsStore], fault: Fault
) -> None:
    store = make_store()
    log = Log(store)
    claim = log.begin()
    for step in range(3):
        log.void(claim, "nothing to save", f"{step}/0-x")
    left = {slot_path(slot): 2 for slot in range(4)}

    def rule(method: str, about: str) -> Fault:
        path = next((path for path in left if path in about and "alt=media" in about), None)
        if path is None or not left[path]:
            return "none"
        left[path] -= 1
        return fault

    proxy.rule = rule
    assert Log(make_store(), patience=IMPATIENT).open() == log.state
    assert set(left.values()) == {0}
    # Two bad readings of each of the four entries; the second of each over a connection that had no bad one before.
    assert len(proxy.bad_over) == 8
    assert all(
        second not in proxy.bad_over[:place] for place, second in list(enumerate(proxy.bad_over))[1::2]
    )
