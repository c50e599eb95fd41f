"""A log and a root in memory, and commits in them."""

from collections.abc import Callable

import pytest

from stepkeeper.log import Claim, Log, ManifestRef
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.memory import MemoryBucket, MemoryStore

CommitStep = Callable[..., int]
"""commit(log, claim, step, folder): the slot. Without a folder it is one that no other commit has."""


@pytest.fixture
def bucket(root: SmallRoot) -> MemoryBucket:
    assert isinstance(root.store, MemoryStore)
    return root.store.bucket


@pytest.fixture
def log(bucket: MemoryBucket) -> Log:
    return Log(MemoryStore(bucket))


@pytest.fixture
def root() -> SmallRoot:
    return SmallRoot()


@pytest.fixture
def commit() -> CommitStep:
    def commit(log: Log, claim: Claim, step: int, folder: str = "") -> int:
        folder = folder or f"{step}/{claim.slot}-{log.state.tail:032x}"
        manifest = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
        return log.commit(claim, step=step, folder=folder, size_bytes=10, manifest=manifest).slot

    return commit
