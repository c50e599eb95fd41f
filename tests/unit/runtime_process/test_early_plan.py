"""While the companion starts, a single rank plans to load HEAD's commit. What is loaded is chosen afterwards."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.errors import TransientStorageError
from stepkeeper.restore import restorer
from stepkeeper.restore.latest import LatestRestore
from stepkeeper.restore.placing import StoredBytes
from stepkeeper.restore.planning import LoadPlan
from stepkeeper_planners.errors import LoadMismatchError


def save(root: Path, step: int) -> None:
    with CheckpointManager(root, save=1) as manager:
        manager.save(step, {"w": torch.full((4,), float(step)), "v": step}).result()


def restore(root: Path) -> tuple[Any, dict[str, Any]]:
    state = {"w": torch.zeros(4), "v": 0}
    with CheckpointManager(root, save=1) as manager:
        return manager.restore(state), state


def refuse(*_: object, **__: object) -> Any:
    raise TransientStorageError("no answer")


def test_the_plan_made_before_the_claim_is_used_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    claim = LatestRestore._claim_and_choose

    def claim_and_plan_no_more(latest: LatestRestore) -> Any:
        monkeypatch.setattr(LoadPlan, "of", refuse)
        return claim(latest)

    monkeypatch.setattr(LatestRestore, "_claim_and_choose", claim_and_plan_no_more)
    _, state = restore(tmp_path)
    assert state["w"].eq(1).all()
    assert state["v"] == 1
    gc.collect()
    assert not any(type(each) in (LoadPlan, StoredBytes) for each in gc.get_objects())


def test_a_commit_that_came_after_the_plan_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    claim = LatestRestore._claim_and_choose

    def save_and_claim(latest: LatestRestore) -> Any:
        monkeypatch.undo()
        save(tmp_path, 2)
        return claim(latest)

    monkeypatch.setattr(LatestRestore, "_claim_and_choose", save_and_claim)
    result, state = restore(tmp_path)
    assert result.step == 2
    assert state["w"].eq(2).all()
    assert state["v"] == 2


def test_while_the_commit_before_a_torn_one_is_loaded_the_plan_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (torn,) = tmp_path.glob("2/*/*.distcp")
    torn.write_bytes(bytes(torn.stat().st_size))
    plans: list[int] = []
    plan = LoadPlan.of

    def count(*args: Any, **options: Any) -> LoadPlan:
        gc.collect()
        plans.append(sum(type(each) is LoadPlan for each in gc.get_objects()))
        return plan(*args, **options)

    monkeypatch.setattr(LoadPlan, "of", count)
    result, state = restore(tmp_path)
    assert result.step == 1
    assert state["w"].eq(1).all()
    assert plans == [0, 0]


@pytest.mark.parametrize("fault", ["fails", "is late"])
def test_a_restore_without_an_early_plan_makes_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    save(tmp_path, 1)
    may_end = threading.Event()
    monkeypatch.setattr(restorer, "_EARLY_S", 0.01)
    monkeypatch.setattr(restorer, "read_head", refuse if fault == "fails" else lambda _: may_end.wait(60))
    result, state = restore(tmp_path)
    may_end.set()
    assert result.step == 1
    assert state["w"].eq(1).all()


def test_a_state_that_does_not_fit_is_refused_as_without_an_early_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    texts = []
    for plans_early in (True, False):
        if not plans_early:
            monkeypatch.setattr(restorer, "read_head", refuse)
        with CheckpointManager(tmp_path, save=1) as manager, pytest.raises(LoadMismatchError) as raised:
            manager.restore({"w": torch.zeros(5), "x": torch.zeros(1)})
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert "shape (4,) in the checkpoint, (5,) in the state" in texts[0]


def test_nothing_is_planned_where_nothing_is_committed(tmp_path: Path) -> None:
    result, state = restore(tmp_path)
    assert result is None
    assert state["w"].eq(0).all()
