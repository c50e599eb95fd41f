"""One of several ranks that restore what they have in common: python sharing.py RANK WORLD_SIZE FOLDER SCENARIO."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepkeeper import CheckpointManager
from stepkeeper.checkpoint import read_manifests
from stepkeeper.errors import PeerLostError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper.storage.posix import PosixStore

MIB = 1024 * 1024
READ = PosixStore.read


class Count:
    """Counts what this process reads of the files of data, and may do something at the n-th read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_bytes = 0
        self.manifests = 0
        self.at_data: Callable[[str, bytes], bytes] = lambda _, data: data
        count = self

        def read(store: PosixStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
            data = READ(store, path, offset, length)
            if path.endswith(".distcp"):
                count.n_bytes += len(data)
                return count.at_data(path, data)
            count.manifests += "/manifest." in path
            return data

        monkeypatch.setattr(PosixStore, "read", read)


def random_state(seed: int, mib: int) -> dict[str, Any]:
    """A few large tensors and many small ones, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    large = {f"large.{n}": torch.randn(mib * MIB // 16, generator=generator).view(-1, 1024) for n in range(4)}
    small = {f"small.{n}": torch.randn(17, n % 7 + 1, generator=generator) for n in range(300)}
    return {**large, **small, "step": seed}


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)

    return all(equal(value, other[name]) for name, value in state.items())


def replicated(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP: of all ranks together each byte is read once, whoever needs it."""
    uri = (folder / "root").as_uri()
    state = random_state(1, 80)
    with CheckpointManager(uri, 1, chkpt_on_preemption=False) as manager:
        manager.save(1, state, force=True)
        into = random_state(2, 80)
        count = Count(monkeypatch)
        assert manager.restore_latest(into) is not None
        assert same(into, state)
        check_read_once(count, folder, rank, n_more_manifests=1)


def hybrid(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HSDP: parts on two ranks each, and what all have."""
    uri = (folder / "root").as_uri()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))

    def sharded(seed: int) -> dict[str, Any]:
        state = random_state(seed, 80)
        return {
            name: distribute_tensor(value, mesh, [Replicate(), Shard(0)])
            if name.startswith("large")
            else value
            for name, value in state.items()
        }

    state, into = sharded(1), sharded(2)
    with CheckpointManager(uri, 1, chkpt_on_preemption=False) as manager:
        manager.save(1, state, force=True)
        count = Count(monkeypatch)
        assert manager.restore_latest(into) is not None
        for name, value in state.items():
            mine, theirs = (
                each.to_local() if hasattr(each, "to_local") else each for each in (value, into[name])
            )
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
        check_read_once(count, folder, rank, n_more_manifests=1)


def check_read_once(count: Count, folder: Path, rank: int, *, n_more_manifests: int) -> None:
    """All ranks together: every byte of the data once, every manifest once, and so many manifests once more.

    A restore reads rank 0's again, to check by it the `.metadata` that stock readers go by.
    """
    (folder / f"read.{rank}").write_text(json.dumps([count.n_bytes, count.manifests]))
    dist.barrier()
    read = [json.loads((folder / f"read.{other}").read_text()) for other in range(dist.get_world_size())]
    store = open_store((folder / "root").as_uri())
    head = Log(store).open().latest
    assert head is not None
    manifests = read_manifests(store, head)
    stored = sum(o.size_bytes for m in manifests for o in m.objects if o.path.endswith(".distcp"))
    total = sum(n_bytes for n_bytes, _ in read)
    print(f"read {[n for n, _ in read]}, stored {stored}: {total / stored:.4f}")
    assert total <= 1.02 * stored
    assert max(n_bytes for n_bytes, _ in read) <= stored / dist.get_world_size() + 33 * MIB
    assert sum(n for _, n in read) == len(manifests) + n_more_manifests


def one_reads_badly(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that ranks go back to step 1, whole, when rank 1 reads bad bytes of step 2 and rank 0 none of them."""
    uri = (folder / "root").as_uri()
    given: list[int] = []

    class Counter:
        n = 0

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]
            given.append(self.n)

    counter = Counter()
    with CheckpointManager(uri, 1, chkpt_on_preemption=False) as manager:
        for step in (1, 2):
            counter.n = step
            manager.save(step, {**random_state(step, 80), "counter": counter}, force=True)
        count = Count(monkeypatch)
        if rank == 1:
            count.at_data = lambda path, data: data[:-1] + b"!" if path.startswith("2/") else data
        into = {**random_state(3, 80), "counter": counter}
        result = manager.restore_latest(into)
        assert result is not None
        assert result.step == 1
        into.pop("counter")
        assert same(into, random_state(1, 80))
        assert given == [1], "an object got something of a commit that is bad"
        assert manager.all_steps() == [1]


def ended(_path: str, data: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return data


def one_is_killed(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ends while it reads: the others say so at once."""
    uri = (folder / "root").as_uri()
    manager = CheckpointManager(uri, 1, chkpt_on_preemption=False)
    manager.save(1, random_state(1, 80), force=True)
    count = Count(monkeypatch)
    if rank == 1:
        count.at_data = ended
    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 is lost: "):
        manager.restore_latest(random_state(2, 80))
    assert time.monotonic() - began_s < 60
    # Nobody is there to say good-bye to.
    os._exit(0)


SCENARIOS = {
    "replicated": replicated,
    "hybrid": hybrid,
    "one_reads_badly": one_reads_badly,
    "one_is_killed": one_is_killed,
}


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = FileStore(str(folder / "ranks"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with pytest.MonkeyPatch.context() as monkeypatch:
        SCENARIOS[sys.argv[4]](rank, folder, monkeypatch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
