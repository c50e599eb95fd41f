"""A store out there does what every store has to do: STEPKEEPER_TEST_BUCKET=gs://bucket/prefix, or any other URI.

The tests write below that prefix, in folders of their own, and delete what they wrote.
"""

import os
import secrets
from collections.abc import Iterator

import pytest

from stepkeeper.storage import Store, open_store
from stepkeeper_testing.store import StoreContract

URI = os.environ.get("STEPKEEPER_TEST_BUCKET", "")


@pytest.mark.skipif(not URI, reason="STEPKEEPER_TEST_BUCKET names no bucket")
class TestRealStore(StoreContract):
    @pytest.fixture
    def uri(self) -> str:
        root = URI if "://" in URI else f"gs://{URI}"
        return f"{root.rstrip('/')}/stepkeeper-test-{secrets.token_hex(8)}"

    @pytest.fixture
    def store(self, uri: str) -> Iterator[Store]:
        store = open_store(uri)
        yield store
        for stat in store.list(""):
            store.delete(stat.path)
        store.close()

    @pytest.fixture
    def another(self, store: Store, uri: str) -> Iterator[Store]:
        another = open_store(uri)
        yield another
        another.close()
