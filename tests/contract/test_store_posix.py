"""A folder does what every store has to do."""

from pathlib import Path

import pytest

from stepkeeper.storage.posix import PosixStore
from stepkeeper.testing.store import StoreContract


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> PosixStore:
        return PosixStore(tmp_path / "runs" / "x")

    @pytest.fixture
    def another(self, tmp_path: Path) -> PosixStore:
        return PosixStore(tmp_path / "runs" / "x")
