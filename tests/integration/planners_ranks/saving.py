"""One of several ranks: saves a state from another process, and checks what it sees of it."""

import json
import os
import sys
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from stepkeeper_planners import SPMDSavePlanner
from stepkeeper_planners.state.per_rank import PerRank

ROWS = 3000


def big_state() -> dict[str, Any]:
    """Replicated: one tensor that only cutting can make even, some of middle size, a tied one, and a value."""
    big = torch.arange(ROWS * 1000, dtype=torch.float32).reshape(ROWS, 1000)
    return {
        "big": big,
        "layers": [torch.full((500, 100), float(i)) for i in range(7)],
        "head": big,
        "step": 3,
    }


def in_another_process(folder: Path, writer: FileSystemWriter) -> None:
    """async_save with torch's checkpointer process, which gets the planner and the state pickled."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    saving = async_save(
        {**big_state(), "own": PerRank({"position": dist.get_rank()})},
        storage_writer=writer,
        planner=SPMDSavePlanner(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(saving, Future)
    metadata = saving.result()
    assert {"big", "head", "own@0/3", "own@1/3", "own@2/3"} <= set(metadata.state_dict_metadata)
    found = {"head": torch.zeros(ROWS, 1000)}
    load(found, storage_reader=FileSystemReader(folder))
    assert torch.equal(found["head"], big_state()["head"])
    assert len(list(folder.glob("__*_0.distcp"))) == dist.get_world_size()


def main(rank: int, world_size: int, folder: Path, settings: str) -> None:
    store = FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    in_another_process(folder, FileSystemWriter(folder, **json.loads(settings)))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
