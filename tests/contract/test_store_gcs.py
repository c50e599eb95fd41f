"""A bucket's prefix does what every store has to do, against an emulator as a process."""

import secrets
from collections.abc import Iterator

import pytest

from stepkeeper.storage.gcs import GcsStore
from stepkeeper_testing.gcs import BUCKET
from stepkeeper_testing.store import StoreContract

pytestmark = pytest.mark.built


class TestGcsStore(StoreContract):
    @pytest.fixture
    def prefix(self) -> str:
        # An error's text holds the object's address: no word in it may pass for the server's own.
        return f"no-such-bucket/{secrets.token_hex(8)}"

    @pytest.fixture
    def store(self, gcs_address: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsStore]:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
        store = GcsStore(bucket=BUCKET, prefix=prefix)
        yield store
        store.close()

    @pytest.fixture
    def another(self, store: GcsStore, prefix: str) -> Iterator[GcsStore]:
        another = GcsStore(bucket=BUCKET, prefix=prefix)
        yield another
        another.close()
