"""What every store has to do: a folder, also between processes and without hard links; memory; a bucket; and others.

One out there is tried too where STEPKEEPER_TEST_BUCKET is gs://bucket/prefix, or any other URI. Those tests write below
that prefix, in folders of their own, and delete what they wrote.
"""

import errno
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stepkeeper.storage import Store, open_store
from stepkeeper.storage.base import Buffer
from stepkeeper.storage.gcs import GcsStore
from stepkeeper.storage.posix import PosixStore
from stepkeeper.tier import CachedStore, LocalTier, TierPlace
from stepkeeper_testing.gcs import BUCKET
from stepkeeper_testing.memory import MemoryBucket, MemoryStore
from stepkeeper_testing.store import StoreContract

URI = os.environ.get("STEPKEEPER_TEST_BUCKET", "")


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore(MemoryBucket())

    @pytest.fixture
    def another(self, store: MemoryStore) -> MemoryStore:
        return MemoryStore(store.bucket)


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> PosixStore:
        return PosixStore(tmp_path / "runs" / "x")

    @pytest.fixture
    def another(self, tmp_path: Path) -> PosixStore:
        return PosixStore(tmp_path / "runs" / "x")


class TestWithoutLinks(TestPosixStore):
    @pytest.fixture(autouse=True)
    def no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", fail)


class Copying(CachedStore):
    """Put a copy of each object on the local disk before the root, too."""

    def write(self, path: str, parts: Sequence[Buffer]) -> None:  # type: ignore[explicit-override]  # Python 3.12's
        super().write(path, parts)
        self._tier.put(path, parts)


def cached_store(folder: Path) -> Copying:
    root = PosixStore(folder / "root")
    tier = LocalTier(TierPlace(folder=str(folder / "disk")), root.uri)
    tier.make_room("1/0-" + "0" * 32, 0, 0)
    return Copying(root, tier)


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


@pytest.mark.built
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


N_PROCESSES = 8
N_THREADS = 8
N_SLOTS = 12

RACER = """
import sys, threading
from pathlib import Path
from stepkeeper.storage.posix import PosixStore

root, number, linked = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
n_threads, n_slots = int(sys.argv[4]), int(sys.argv[5])
if linked == "unlinked":
    import os
    def no_link(*_):
        raise PermissionError(1, "no links here")
    os.link = no_link
start = threading.Barrier(n_threads)

def race(thread):
    store = PosixStore(root)
    start.wait()
    for slot in range(n_slots):
        me = f"{number}.{thread}"
        if store.put_if_absent(f"log/{slot:08d}.json", me.encode()):
            wins.append(f"{slot} {me}")

wins = []
print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=race, args=(n,)) for n in range(n_threads)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for win in wins: print(win)
"""


@pytest.mark.parametrize("linked", ["linked", "unlinked"])
def test_of_64_threads_in_8_processes_one_wins_each_slot(tmp_path: Path, linked: str) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, tmp_path / "root", str(n), linked, str(N_THREADS), str(N_SLOTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(N_PROCESSES)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    wins: list[list[str]] = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        wins += [line.split() for line in racer.communicate()[0].splitlines()]
        assert racer.returncode == 0
    assert sorted(int(slot) for slot, _ in wins) == list(range(N_SLOTS))
    store = PosixStore(tmp_path / "root")
    for slot, winner in wins:
        assert store.read(f"log/{int(slot):08d}.json") == winner.encode()
    assert [path for path in (tmp_path / "root" / "log").iterdir() if path.name.startswith(".tmp-")] == []
