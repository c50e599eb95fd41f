"""One of two ranks, each on a node of its own: python two_nodes.py RANK WORLD_SIZE FOLDER. One case after the other."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from stepkeeper import CheckpointManager
from stepkeeper.companion.messages import OpenRequest
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.errors import BadNodeError, RestoreError
from stepkeeper.log import Log
from stepkeeper.log.foreign_steps import Restorable
from stepkeeper.restore import LatestRestore, Restorer
from stepkeeper.restore.second_read import Host
from stepkeeper.storage import ObjectStat, Store, open_store
from stepkeeper.storage.base import Buffer
from stepkeeper_planners.loading.load_request import LoadTarget

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class BadNode:
    """A store as a node with bad memory sees it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def uri(self) -> str:
        return self._store.uri

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self._store.put_if_absent(path, data)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self._store.write(path, parts)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._store.read(path, offset, length)
        return flipped(data) if path.endswith(".distcp") else data

    def list(self, prefix: str) -> list[ObjectStat]:
        return self._store.list(prefix)

    def delete(self, path: str) -> None:
        self._store.delete(path)

    def close(self) -> None:
        self._store.close()


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def flip(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes()))


def state_at(step: int) -> dict[str, Any]:
    """Return the state at a step. Only rank 1 asks for what is under "b"."""
    state: dict[str, Any] = {"a": torch.full((1000,), float(step))}
    if RANK == 1 or step:
        state["b"] = torch.full((2000,), float(step))
    return state


def saved(name: str, steps: Sequence[int]) -> Path:
    root = FOLDER / name
    with CheckpointManager(root.as_uri(), 1, chkpt_on_preemption=False) as manager:
        for step in steps:
            manager.save(step, state_at(step), force=True)
    return root


def restored(
    root: Path,
    state: dict[str, Any],
    *,
    bad: bool = False,
    bad_again: bool = False,
    one_machine: bool = False,
) -> Restorable | None:
    """By a process that reads on a node of its own name; `bad` ones may read good bytes over another connection."""
    rank_group = StoreRankGroup.of(None)
    uri = root.as_uri()
    companion = Companion(OpenRequest(rank=RANK, world_size=WORLD_SIZE, uri=uri), print)
    store = open_store(uri)

    def reopen() -> Store:
        return BadNode(open_store(uri)) if bad_again else open_store(uri)

    host = Host(name=f"node-{RANK}", machine="one" if one_machine else str(RANK))
    restorer = Restorer(BadNode(store) if bad else store, rank_group, host=host, reopen=reopen)
    try:
        return LatestRestore(restorer, companion).restore(LoadTarget(state))
    finally:
        dist.barrier()
        companion.close(10)


def quarantined(root: Path) -> list[int]:
    commits = Log(open_store(root.as_uri())).open().commits.values()
    return [record.step for record in commits if record.quarantined]


def a_bad_node_condemns_nothing() -> None:
    root = saved("bad_node", (1, 2))
    said = r"node node-1 \(rank 1\) reads bad bytes where node node-0 reads good ones: .*__\d_\d\.distcp"
    with pytest.raises(BadNodeError, match=said):
        restored(root, state_at(0), bad=RANK == 1, bad_again=RANK == 1)
    assert quarantined(root) == []


def bytes_that_two_nodes_read_bad_are_condemned() -> None:
    root = saved("bad_bytes", (1, 2))
    dist.barrier()
    if RANK == 0:
        for path in root.glob("2/*/__*.distcp"):
            flip(path)
    dist.barrier()
    state = state_at(0)
    record = restored(root, state)
    assert record is not None
    assert record.step == 1
    assert all(torch.equal(state[name], state_at(1)[name]) for name in state)
    assert quarantined(root) == [2]
    if RANK == 0:
        log = Log(open_store(root.as_uri()))
        bodies = [log.entry(slot).body for slot in range(log.open().tail + 1)]
        (reason,) = (body.reason for body in bodies if hasattr(body, "commit") and hasattr(body, "reason"))
        assert "read bad by nodes node-" in reason, reason


def one_machine_reads_again_over_fresh_connections() -> None:
    root = saved("one_machine", (1, 2))
    with pytest.raises(BadNodeError, match=r"node-1 \(rank 1\) reads bad bytes, and good ones over a fresh"):
        restored(root, state_at(0), bad=RANK == 1, one_machine=True)
    assert quarantined(root) == []
    dist.barrier()
    with pytest.raises(
        RestoreError,
        match=r"two checkpoints were read bad.*__0_0.distcp .*node-1.*; and .*__0_0.distcp .*node-1",
    ):
        restored(root, state_at(0), bad=RANK == 1, bad_again=RANK == 1, one_machine=True)
    assert quarantined(root) == [2], "one, not both"


def main() -> None:
    store = FileStore(str(FOLDER / "ranks"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    for case in (
        a_bad_node_condemns_nothing,
        bytes_that_two_nodes_read_bad_are_condemned,
        one_machine_reads_again_over_fresh_connections,
    ):
        print(case.__name__, flush=True)
        case()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
