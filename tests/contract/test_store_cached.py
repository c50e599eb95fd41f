"""A root that is read by way of a local disk does what every store has to do, with copies of all that was written."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from stepkeeper.storage import Store
from stepkeeper.storage.base import Buffer
from stepkeeper.storage.posix import PosixStore
from stepkeeper.tier import CachedStore, LocalTier, TierPlace
from stepkeeper_testing.store import StoreContract


class Copying(CachedStore):
    """Puts a copy of each object there too."""

    def write(self, path: str, parts: Sequence[Buffer]) -> None:  # type: ignore[explicit-override]  # Python 3.12's
        super().write(path, parts)
        self._tier.put(path, parts)


class TestCachedStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Copying:
        return cached_store(tmp_path)

    @pytest.fixture
    def another(self, tmp_path: Path) -> Copying:
        return cached_store(tmp_path)

    def test_a_large_object(self, store: Store, another: Store) -> None:  # type: ignore[explicit-override, override]  # and more
        assert isinstance(store, Copying)
        super().test_a_large_object(store)
        assert store.take_read_bytes() >= self.large_bytes
        assert store.take_read_bytes() == 0


def cached_store(folder: Path) -> Copying:
    root = PosixStore(folder / "root")
    tier = LocalTier(TierPlace(folder=str(folder / "disk")), root.uri)
    tier.make_room("1/0-" + "0" * 32, 0, 0)
    return Copying(root, tier)
