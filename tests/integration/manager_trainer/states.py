"""One of several ranks with something of its own: python states.py RANK WORLD_SIZE FOLDER CASE. Ends well or badly."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepkeeper import CheckpointManager, PerRank
from stepkeeper.errors import CopiesDifferError, SaveError, StepkeeperError
from stepkeeper_planners.errors import LoadMismatchError, RanksDifferError, UnsupportedValueError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_testing.trainer import join

RANK, WORLD_SIZE, FOLDER, CASE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
ROOT = FOLDER / "root"


class Loader:
    """Hands out every WORLD_SIZE-th document, from its own place on."""

    def __init__(self) -> None:
        self.documents = list(range(RANK, 12, WORLD_SIZE))

    def state_dict(self) -> dict[str, Any]:
        return {"documents": list(self.documents)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.documents = state["documents"]


def split_evenly(saved: Sequence[Any], ranks: Ranks) -> dict[str, Any]:
    left = sorted(document for each in saved for document in each["documents"])
    return {"documents": left[ranks.rank :: ranks.world_size]}


def new_state(resize: Callable[[Sequence[Any], Ranks], object] | None = split_evenly) -> dict[str, Any]:
    return {
        "w": torch.zeros(1000),
        "b": torch.zeros(700),
        "step": 0,
        "loader": PerRank(Loader(), resize=resize),
    }


def train(manager: CheckpointManager) -> None:
    """Goes on from what is there, every rank taking one document a step, and says what it has left."""
    state = new_state()
    restored = manager.restore(state)
    first = restored.step + 1 if restored else 1
    documents = state["loader"].value.documents
    (FOLDER / f"at-{first - 1}-{RANK}-of-{WORLD_SIZE}").write_text(repr(documents))
    assert state["step"] == first - 1
    assert torch.equal(state["w"], torch.full((1000,), float(first - 1)))
    for step in (first, first + 1):
        state["w"] += 1
        state["step"] = step
        documents.pop(0)
        manager.step(step, state)


def refused(manager: CheckpointManager) -> None:
    """At another world size, where nothing says what becomes of the loaders."""
    state = new_state(resize=None)
    error = failure_of(partial(manager.restore, state), LoadMismatchError)
    assert "loader" in str(error)
    assert "resize=" in str(error)


def failure_of(act: Callable[[], object], kind: type[Exception]) -> Exception:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def differs(manager: CheckpointManager) -> None:
    """Saves of states that aren't alike are given up on all ranks; those before and after them are commits."""
    state = new_state()
    manager.save(1, state).result()
    for step, own in (
        (2, {"position": RANK}),
        (3, {f"only.{RANK}": torch.ones(3)}),
        (4, {"rng": torch.tensor([RANK])}),
    ):
        before = sorted(str(path) for path in ROOT.rglob("*"))
        in_flight = manager.save(step, {**state, **own})
        if step == 4:
            # The names of copies that differ are found by the next save, before it copies anything.
            failure_of(partial(in_flight.result, 60), CopiesDifferError)
            in_flight = manager.save(step, {**state, **own})
        error = failure_of(partial(in_flight.result, 60), RanksDifferError)
        name = next(iter(own)) if step != 3 else "only.0"
        assert isinstance(error, RanksDifferError)
        assert error.ranks[name] == (1,), error.ranks
        assert sorted(str(path) for path in ROOT.rglob("*")) == before
        late = failure_of(partial(manager.step, step, state), SaveError)
        assert f"{name} (on rank 1)" in str(late)
        assert isinstance(late.__cause__, RanksDifferError)
    manager.save(5, state).result()
    # One rank can't take its snapshot; the others aren't left waiting.
    bad = {**state, "handle": object()} if RANK == 1 else {**state, "handle": 1}
    kind = UnsupportedValueError if RANK == 1 else SaveError
    error = failure_of(lambda: (manager.save(6, bad), manager.wait()), kind)
    assert "handle" in str(error)
    # It was raised in all of them, and isn't again.
    manager.wait()
    manager.save(7, state).result()
    assert manager.steps() == [1, 5, 7]


def main() -> None:
    if WORLD_SIZE > 1:
        join(RANK, WORLD_SIZE, FOLDER)
    case = {"train": train, "refused": refused, "differs": differs}[CASE]
    interval = 2 if CASE == "train" else 10**6
    manager = CheckpointManager(ROOT.as_uri(), save=interval)
    try:
        case(manager)
        manager.close()
    except StepkeeperError:
        manager.__exit__(*sys.exc_info())
        raise
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


main()
