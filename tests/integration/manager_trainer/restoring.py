"""One of several ranks that restore: python restoring.py RANK WORLD_SIZE FOLDER SCENARIO."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from stepkeeper import CheckpointManager
from stepkeeper_planners.errors import LoadMismatchError, UnsupportedValueError


def one_does_not_fit(rank: int, folder: Path) -> None:
    """Rank 1 asks for another shape: nobody's state changes, and all raise the same."""
    uri = (folder / "root").as_uri()
    with CheckpointManager(uri, 1, chkpt_on_preemption=False) as manager:
        manager.save(1, {"w": torch.ones(4), "n": 7, "more": torch.ones(2)}, force=True)
        state: dict[str, Any] = {"w": torch.zeros(4 + rank), "n": 0, "more": torch.zeros(2)}
        for restore in (partial(manager.restore, 1), manager.restore_latest):
            with pytest.raises(LoadMismatchError) as raised:
                restore(state)
            assert raised.value.ranks == {"w": (1,)}
            assert "shape (4,) in the checkpoint, (5,) in the state" in str(raised.value)
            assert "exclude=('w',) leaves those that differ as they are in the state." in str(raised.value)
            assert (state["w"].sum(), state["n"], state["more"].sum()) == (0, 0, 0)
        # Neither commit nor manager have suffered, and a part of the names is enough for one of several ranks.
        fits: dict[str, Any] = {"w": torch.zeros(4), "n": 0}
        if rank == 0:
            fits["more"] = torch.zeros(2)
        assert manager.restore_latest(fits) is not None
        assert (fits["w"].sum(), fits["n"]) == (4, 7)
        assert manager.all_steps() == [1]


def one_cannot_ask(rank: int, folder: Path) -> None:
    """What rank 1 raises is raised in rank 0 as what it is."""
    with CheckpointManager((folder / "root").as_uri(), 1, chkpt_on_preemption=False) as manager:
        manager.save(1, {"w": torch.ones(4)}, force=True)
        state: dict[str, Any] = {"w": torch.zeros(4)}
        if rank == 1:
            state["lazy"] = torch.nn.UninitializedParameter()
        with pytest.raises(UnsupportedValueError, match=r"lazy: a lazy parameter") as raised:
            manager.restore(1, state)
        assert str(raised.value).startswith("rank 1: ") == (rank == 0)
        assert state["w"].sum() == 0


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = FileStore(str(folder / "ranks"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    {"one_does_not_fit": one_does_not_fit, "one_cannot_ask": one_cannot_ask}[sys.argv[4]](rank, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
