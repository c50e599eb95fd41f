"""One of several ranks that restore: python restoring.py RANK WORLD_SIZE FOLDER SCENARIO."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stepkeeper import CheckpointManager, Options
from stepkeeper.checkpoint.reading import read_manifests
from stepkeeper.errors import PeerLostError, RestoreError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper.storage.posix import PosixStore
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_testing.trainer import join

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
URI = (FOLDER / "root").as_uri()
MIB = 1024 * 1024
READ = PosixStore.read


def open_manager(**options: Any) -> CheckpointManager:
    return CheckpointManager(URI, save=1, options=Options(stop_on_notice=False, **options))


def one_does_not_fit() -> None:
    """Rank 1 asks for another shape: nobody's state changes, and all raise the same."""
    with open_manager() as manager:
        manager.save(1, {"w": torch.ones(4), "n": 7, "more": torch.ones(2)}).result()
        state: dict[str, Any] = {"w": torch.zeros(4 + RANK), "n": 0, "more": torch.zeros(2)}
        for step in (1, None):
            with pytest.raises(LoadMismatchError) as raised:
                manager.restore(state, step)
            assert raised.value.ranks == {"w": (1,)}
            assert "shape (4,) in the checkpoint, (5,) in the state" in str(raised.value)
            assert "exclude=('w',) leaves those that differ as they are in the state." in str(raised.value)
            assert (state["w"].sum(), state["n"], state["more"].sum()) == (0, 0, 0)
        # Neither commit nor manager have suffered, and a part of the names is enough for one of several ranks.
        fits: dict[str, Any] = {"w": torch.zeros(4), "n": 0}
        if RANK == 0:
            fits["more"] = torch.zeros(2)
        assert manager.restore(fits) is not None
        assert (fits["w"].sum(), fits["n"]) == (4, 7)
        assert manager.steps() == [1]


def going_back() -> None:
    """Check that saves after an older step was restored descend from it, in a process that has saved before."""

    def parents() -> dict[int, int | None]:
        dist.barrier()
        state = Log(open_store(URI)).open()
        steps = {record.slot: record.step for record in state.live}
        return {r.step: None if r.parent is None else steps[r.parent] for r in state.line}

    state: dict[str, Any] = {"w": torch.zeros(4), "ema": torch.zeros(2)}
    with open_manager(max_pending=2) as manager:
        for step in (1, 2, 3):
            state["w"].fill_(step)
            manager.save(step, state)
        manager.restore(state, 1)
        assert state["w"].tolist() == [1.0] * 4, state
        assert manager.steps() == [1, 2, 3], "the log is left alone until there is something to say"
        # A part says nothing of the rest.
        manager.restore(state, 2, items=["ema"])
        state["w"].fill_(4)
        for step in (4, 5):
            manager.save(step, state)
        manager.wait()
        assert parents() == {5: 4, 4: 1, 1: None}
        with pytest.raises(RestoreError, match=r"no commit of step 3; its steps: 1, 4, 5$"):
            manager.restore(state, 3)
        # Twice back to the same one.
        for step in (8, 9):
            manager.restore(state, 4)
            state["w"].fill_(step)
            manager.save(step, state).result()
        assert parents() == {9: 4, 4: 1, 1: None}
    with open_manager() as later:
        restored = later.restore(state)
        assert restored is not None
        assert (restored.step, state["w"].tolist()) == (9, [9.0] * 4)


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


def random_state(seed: int) -> dict[str, Any]:
    """A few large tensors and many small ones, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    large = {f"large.{n}": torch.randn(5 * MIB, generator=generator).view(-1, 1024) for n in range(4)}
    small = {f"small.{n}": torch.randn(17, n % 7 + 1, generator=generator) for n in range(300)}
    return {**large, **small, "step": seed}


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)

    return all(equal(value, other[name]) for name, value in state.items())


def read_together() -> None:
    """HSDP: parts on two ranks each, and what all have. Of all ranks together each byte is read once."""
    mesh = init_device_mesh("cpu", (2, WORLD_SIZE // 2))

    def sharded(seed: int) -> dict[str, Any]:
        state = random_state(seed)
        return {
            name: distribute_tensor(value, mesh, [Replicate(), Shard(0)])
            if name.startswith("large")
            else value
            for name, value in state.items()
        }

    def local(state: dict[str, Any]) -> dict[str, Any]:
        return {name: v.to_local() if hasattr(v, "to_local") else v for name, v in state.items()}

    state, into = sharded(1), sharded(2)
    with open_manager() as manager, pytest.MonkeyPatch.context() as patch:
        manager.save(1, state).result()
        count = Count(patch)
        assert manager.restore(into) is not None
        assert same(local(into), local(state))
        check_read_once(count)


def check_read_once(count: Count) -> None:
    """All ranks together: every byte of the data once, every manifest once, and one of them twice.

    A restore reads rank 0's again, to check by it the `.metadata` that stock readers go by.
    """
    read: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(read, [count.n_bytes, count.manifests])
    store = open_store(URI)
    head = Log(store).open().latest
    assert head is not None
    manifests = read_manifests(store, head)
    stored = sum(o.size_bytes for m in manifests for o in m.objects if o.path.endswith(".distcp"))
    total = sum(n_bytes for n_bytes, _ in read)
    print(f"read {[n for n, _ in read]}, stored {stored}: {total / stored:.4f}")
    assert total <= 1.02 * stored
    assert max(n_bytes for n_bytes, _ in read) <= stored / WORLD_SIZE + 33 * MIB
    assert sum(n for _, n in read) == len(manifests) + 1


def one_reads_badly() -> None:
    """Check that ranks go back to step 1, whole, when rank 1 reads bad bytes of step 2 and rank 0 none of them."""
    given: list[int] = []

    class Counter:
        n = 0

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]
            given.append(self.n)

    counter = Counter()
    with open_manager() as manager, pytest.MonkeyPatch.context() as patch:
        for step in (1, 2):
            counter.n = step
            manager.save(step, {**random_state(step), "counter": counter}).result()
        count = Count(patch)
        if RANK == 1:
            count.at_data = lambda path, data: data[:-1] + b"!" if path.startswith("2/") else data
        into = {**random_state(3), "counter": counter}
        result = manager.restore(into)
        assert result is not None
        assert result.step == 1
        into.pop("counter")
        assert same(into, random_state(1))
        assert given == [1], "an object got something of a commit that is bad"
        assert manager.steps() == [1]


def one_is_killed() -> None:
    """Rank 1 ends while it reads: the others say so at once."""

    def die(_path: str, data: bytes) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return data

    manager = open_manager()
    manager.save(1, random_state(1)).result()
    if RANK == 1:
        Count(pytest.MonkeyPatch()).at_data = die
    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 is lost: "):
        manager.restore(random_state(2))
    assert time.monotonic() - began_s < 60
    # No other rank is there to say good-bye to.
    os._exit(0)


join(RANK, WORLD_SIZE, FOLDER)
scenarios = (one_does_not_fit, going_back, read_together, one_reads_badly, one_is_killed)
{each.__name__: each for each in scenarios}[sys.argv[4]]()
dist.destroy_process_group()
