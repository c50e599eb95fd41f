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
from stepkeeper.errors import RestoreError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_planners.errors import LoadMismatchError


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


def going_back(rank: int, folder: Path) -> None:
    """Check that saves after an older step was restored descend from it, in a process that has saved before."""
    uri = (folder / "root").as_uri()

    def parents() -> dict[int, int | None]:
        state = Log(open_store(uri)).open()
        steps = {record.slot: record.step for record in state.live}
        return {r.step: None if r.parent is None else steps[r.parent] for r in state.line}

    with CheckpointManager(uri, 1, max_pending_async=2, chkpt_on_preemption=False) as manager:
        state: dict[str, Any] = {"w": torch.zeros(4), "ema": torch.zeros(2)}
        for step in (1, 2, 3):
            state["w"].fill_(step + rank * (step == 2))
            manager.save_async(step, state)
        manager.restore(1, state)
        assert state["w"].tolist() == [1.0] * 4, state
        assert manager.all_steps() == [1, 2, 3], "the log is left alone until there is something to say"
        # A part says nothing of the rest.
        manager.restore(2, state, items=["ema"])
        state["w"].fill_(4)
        assert manager.save_async(4, state)
        assert manager.save_async(5, state)
        manager.join()
        dist.barrier()
        assert parents() == {5: 4, 4: 1, 1: None}
        assert manager.all_steps() == [1, 4, 5]
        with pytest.raises(RestoreError, match=r"no commit of step 3; its steps: 1, 4, 5$"):
            manager.restore(3, state)
        # What HEAD is, or a part of what was: all goes on.
        manager.restore(4, state)
        assert manager.restore_latest(state) is not None
        manager.save(6, state)
        manager.restore(6, state)
        manager.restore(1, state, exclude=["w"])
        manager.save(7, state)
        dist.barrier()
        assert parents() == {7: 6, 6: 5, 5: 4, 4: 1, 1: None}
        # Twice back to the same one.
        for step in (8, 9):
            manager.restore(4, state)
            state["w"].fill_(step)
            manager.save(step, state)
        dist.barrier()
        assert parents() == {9: 4, 4: 1, 1: None}
    with CheckpointManager(uri, 1, chkpt_on_preemption=False) as later:
        state = {"w": torch.zeros(4), "ema": torch.zeros(2)}
        restored = later.restore_latest(state)
        assert restored is not None
        assert (restored.step, state["w"].tolist()) == (9, [9.0] * 4)


SCENARIOS = {
    "one_does_not_fit": one_does_not_fit,
    "going_back": going_back,
}


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = FileStore(str(folder / "ranks"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    SCENARIOS[sys.argv[4]](rank, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
