"""A folder does what every store has to do, also between processes, and on file systems without hard links."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.storage.posix import PosixStore
from stepkeeper_testing.store import StoreContract

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
