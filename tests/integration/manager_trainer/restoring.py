"""One of several ranks that restore: python restoring.py RANK WORLD_SIZE FOLDER SCENARIO."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager, Options, PartlyRestoredError
from stepkeeper.errors import RestoreError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper.storage.posix import PosixStore
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_testing.trainer import join

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
URI = (FOLDER / "root").as_uri()
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
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("stepkeeper_planners.loading.differences").addHandler(handler)
        some: dict[str, Any] = {"w": torch.zeros(4), f"new{RANK}": torch.zeros(2)}
        if RANK == 1:
            some["n"] = 0
        assert manager.restore(some, strict=False) is not None
        assert (some["w"].sum(), some.get("n", 7)) == (4, 7)
        assert logged == (
            []
            if RANK
            else [
                "strict=False: 2 not in the checkpoint, left as they were: new0 (on rank 0), new1 (on rank 1)",
                "strict=False: 1 not in the state, not restored: more",
            ]
        )
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


def one_reads_badly() -> None:
    """Check that ranks go back to step 1, whole, when rank 1 reads bad bytes of step 2 and rank 0 none of them."""

    def state_at(step: int) -> dict[str, Any]:
        return {f"w{n}": torch.full((5 << 20,), float(step)) for n in range(4)} | {"step": step}

    def read(store: PosixStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = READ(store, path, offset, length)
        return data[:-1] + b"!" if path.startswith("2/") and path.endswith(".distcp") else data

    with open_manager() as manager, pytest.MonkeyPatch.context() as patch:
        for step in (1, 2):
            manager.save(step, state_at(step)).result()
        if RANK == 1:
            patch.setattr(PosixStore, "read", read)
        state = state_at(0)
        result = manager.restore(state)
        assert result is not None
        assert (result.step, state.pop("step")) == (1, 1)
        assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in state.values())
        assert manager.steps() == [1]


def one_object_refuses() -> None:
    """Rank 1's object refuses step 2: both ranks have a mixed state, and save none before both have restored one."""

    class Refusing:
        error: Exception | None = None

        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, _: dict[str, Any]) -> None:
            if self.error is not None:
                raise self.error

    refusing = Refusing()
    state: dict[str, Any] = {"n": 0, "refusing": refusing}

    def restore_mixed(manager: CheckpointManager, step: int) -> None:
        refusing.error = ValueError("not this") if RANK == 1 else None
        with pytest.raises(
            PartlyRestoredError, match=rf"step {step} .*not this.*Refusing\.load_state_dict"
        ) as raised:
            manager.restore(state, step)
        assert (raised.value.__cause__ is refusing.error) == (RANK == 1)
        refusing.error = None

    with CheckpointManager(URI, save=1000, options=Options(stop_on_notice=False)) as manager:
        for step in (1, 2):
            state["n"] = step
            manager.save(step, state).result()
        manager.step(3, state)
        restore_mixed(manager, 2)
        for call in (manager.step, manager.save):
            with pytest.raises(PartlyRestoredError, match=r"step 2 .*not this"):
                call(4, state)
        manager.restore(state, 1)
        assert state["n"] == 1
        manager.save(4, state).result()
        manager.step(5, state)
        restore_mixed(manager, 4)
    assert manager.steps() == [1, 4]


join(RANK, WORLD_SIZE, FOLDER)
scenarios = (one_does_not_fit, going_back, one_reads_badly, one_object_refuses)
{each.__name__: each for each in scenarios}[sys.argv[4]]()
dist.destroy_process_group()
