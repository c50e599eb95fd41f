"""The store in memory does what every store has to do."""

import pytest

from stepkeeper_testing.memory import MemoryBucket, MemoryStore
from stepkeeper_testing.store import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore(MemoryBucket())

    @pytest.fixture
    def another(self, store: MemoryStore) -> MemoryStore:
        return MemoryStore(store.bucket)
