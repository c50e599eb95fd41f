"""One of several ranks, each with a disk of its own: python ranks.py RANK WORLD_SIZE FOLDER."""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager
from stepkeeper.log import Log, RestoredEntry
from stepkeeper.storage import open_store
from stepkeeper.storage.posix import PosixStore
from stepkeeper_testing.trainer import join, open_manager

READ = PosixStore.read


def counted(root: Path) -> list[str]:
    """The names of the files of data that this process has read in the root, from here on."""
    names: list[str] = []

    def read(store: PosixStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(".distcp") and store.uri == root.as_uri():
            names.append(path.rpartition("/")[2])
        return READ(store, path, offset, length)

    PosixStore.read = read  # type: ignore[assignment, method-assign]  # that is the point
    return names


def state_at(step: int) -> dict[str, Any]:
    """The same on all ranks; a few blocks of each one's objects."""
    sizes = (24 << 18, *[4 << 18] * 9)
    return {f"w{n}": torch.full((size,), float(step + n)) for n, size in enumerate(sizes)} | {"step": step}


def restored(folder: Path, rank: int) -> dict[str, Any]:
    state = state_at(0)
    with manager_of(folder, rank) as manager:
        assert manager.restore(state) is not None
    return state


def manager_of(folder: Path, rank: int) -> CheckpointManager:
    return open_manager(folder / "root", local_tier=folder / f"disk{rank}")


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join(rank, world_size, folder)
    with manager_of(folder, rank) as manager:
        manager.save(3, state_at(3)).result()
    names = counted(folder / "root")
    expected = state_at(3)
    state = restored(folder, rank)
    assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(expected[name])) for name in state)
    assert names == [], names
    log = Log(open_store((folder / "root").as_uri()))
    assert not any(isinstance(log.entry(slot).body, RestoredEntry) for slot in range(log.open().tail + 1))
    dist.barrier()
    if rank == 1:
        shutil.rmtree(folder / "disk1")
    dist.barrier()
    state = restored(folder, rank)
    assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(expected[name])) for name in state)
    # Each block that rank 1 wrote is read once by one of the two; what rank 0 has nobody asks the root for.
    by_rank: list[Any] = [None] * world_size
    dist.all_gather_object(by_rank, names)
    assert sum(map(len, by_rank)) > 0
    assert {name[:4] for each in by_rank for name in each} == {"__1_"}, by_rank
    dist.destroy_process_group()


main()
