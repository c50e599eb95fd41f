"""One of several ranks: python rank.py RANK WORLD_SIZE FOLDER CHECKPOINT… loads its part of each checkpoint."""

import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from stepkeeper.dcp import StorageReader
from stepkeeper_planners import SafeFileSystemReader, SPMDLoadPlanner

STATES = runpy.run_path(str(Path(__file__).parents[2] / "property" / "planners_parts" / "release_state.py"))


def check(checkpoint: Path) -> None:
    wanted = STATES["make_whole_state"]()
    for reader in (SafeFileSystemReader, StorageReader):
        for planner in (None, SPMDLoadPlanner()):
            state = STATES["make_sharded_state"](100)
            load(state, storage_reader=reader(checkpoint), planner=planner)
            for name, value in state.items():
                found = value.full_tensor() if isinstance(value, DTensor) else value
                if isinstance(found, torch.Tensor):
                    assert torch.equal(found, wanted[name]), (checkpoint, name)
                else:
                    assert found == wanted[name], (checkpoint, name)


def main(rank: int, world_size: int, folder: Path, checkpoints: list[Path]) -> None:
    store = FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for checkpoint in checkpoints:
        check(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])
