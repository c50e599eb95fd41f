"""Another writer's steps: which is restored, which of its faults are bad bytes, and what isn't read here."""

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW

from stepkeeper import CheckpointManager
from stepkeeper.errors import RestoreError, TransientStorageError
from stepkeeper.log import ForeignBase
from stepkeeper.restore.foreign.choosing import choose_foreign_step
from stepkeeper.storage.retry import Patience
from stepkeeper_planners import SPMDSavePlanner, prime_optimizer
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryBucket, MemoryStore


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((6, 4), float(step)), "b": torch.arange(5)}, "step": step}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A root with steps 100 and 200 of stock DCP."""
    root = tmp_path_factory.mktemp("legacy")
    for folder, step in (("step-100", 100), ("step-200", 200)):
        save(state_of(step), checkpoint_id=root / folder, no_dist=True)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def bucket(objects: dict[str, bytes]) -> MemoryBucket:
    bucket = MemoryBucket()
    bucket.objects.update(objects)
    return bucket


def chosen(bucket: MemoryBucket) -> ForeignBase | None:
    return choose_foreign_step(MemoryStore(bucket), lambda: MemoryStore(bucket))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (".metadata", None, "has no .metadata"),
        (".metadata", slice(-30), "the metadata of a checkpoint"),
        ("__0_0.distcp", None, "__0_0.distcp is missing"),
        ("__0_0.distcp", slice(-1), "__0_0.distcp is cut short"),
    ],
)
def test_what_is_incomplete_is_passed_over_and_said(
    bucket: MemoryBucket, caplog: pytest.LogCaptureFixture, name: str, data: slice | None, said: str
) -> None:
    whole = bucket.objects.pop(f"step-200/{name}")
    if data is not None:
        bucket.objects[f"step-200/{name}"] = whole[data]
    found = chosen(bucket)
    assert found is not None
    assert (found.step, found.folder) == (100, "step-100")
    assert said in (found.reason or "")
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert said in record.getMessage()


def test_where_none_is_complete_nothing_is_begun(bucket: MemoryBucket) -> None:
    for step in (100, 200):
        del bucket.objects[f"step-{step}/.metadata"]
    with pytest.raises(RestoreError, match=r"none of them is complete: step 200 .*; step 100 .*another root"):
        chosen(bucket)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (".metadata", "the root itself"),
        ("final/.metadata", "final"),
        ("run1/step_100/.metadata", "run1/step_100"),
        (f"run1/100/3-{'0' * 32}/.metadata", f"run1/100/3-{'0' * 32}"),
    ],
)
def test_a_checkpoint_without_a_step_in_its_name_is_not_taken_for_nothing(path: str, said: str) -> None:
    bucket = MemoryBucket()
    bucket.objects[path] = b"?"
    with pytest.raises(RestoreError, match=rf"aren't steps of it: {said}\. Use the folder"):
        chosen(bucket)


def test_no_answer_is_no_incomplete_step(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket, hook=at("before read", TransientStorageError("no answer")))
    with pytest.raises(TransientStorageError):
        choose_foreign_step(store, lambda: store, patience=Patience(total_s=0))


class Scaled(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is pickled by a name under which it is found."""
    monkeypatch.setattr(Scaled, "__module__", "torch")
    monkeypatch.setattr(torch, "Scaled", Scaled, raising=False)


def restored(root: Path, exclude: Sequence[str] = ()) -> torch.Tensor:
    state = {"w": torch.zeros(4, 4), "b": torch.zeros(100)}
    with CheckpointManager(root) as manager:
        manager.restore(state, exclude=exclude)
    return state["b"]


def save_two(root: Path, tensor: torch.Tensor) -> None:
    for step, w in (("100", torch.zeros(4, 4)), ("200", tensor)):
        save({"w": w, "b": torch.ones(100)}, checkpoint_id=root / step, no_dist=True)


@pytest.mark.parametrize("planner", [SPMDSavePlanner, DefaultSavePlanner])
def test_an_optimizer_comes_back_by_its_names(tmp_path: Path, planner: type[SavePlanner]) -> None:
    """The names of a Sequential's parameters begin with numbers, as groups do."""
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    first, second = (
        AdamW(model.parameters(), lr=rate) for model, rate in zip(models, (0.5, 0.0), strict=True)
    )
    for optimizer in (first, second):
        prime_optimizer(optimizer)
    for number, parameter in enumerate(models[0].parameters()):
        first.state[parameter]["exp_avg"].fill_(number)
    saved: Any = {"model": models[0], "optimizer": first}
    if planner is DefaultSavePlanner:
        saved = {"model": models[0].state_dict(), "optimizer": get_optimizer_state_dict(models[0], first)}
    save({"s": saved}, checkpoint_id=tmp_path / "7", planner=planner(), no_dist=True)
    with CheckpointManager(tmp_path) as manager:
        manager.restore({"s": {"optimizer": second, "model": models[1]}})
    assert second.param_groups[0]["lr"] == 0.5
    means = [second.state[parameter]["exp_avg"].mean() for parameter in models[1].parameters()]
    assert means == [0, 1, 2, 3]


def test_a_tensor_that_is_not_read_is_named_and_the_step_is_not_passed_over(tmp_path: Path) -> None:
    save_two(tmp_path, torch.eye(4).as_subclass(Scaled))
    with pytest.raises(
        RestoreError, match=r"/200: w can't be read by stepkeeper: it names torch.Scaled"
    ) as raised:
        restored(tmp_path)
    assert "exclude=['w']" in str(raised.value)
    assert "dcp.load" in str(raised.value)
    assert torch.equal(restored(tmp_path, exclude=["w"]), torch.ones(100))


def test_metadata_that_names_what_is_not_read_is_no_reason_to_go_back(tmp_path: Path) -> None:
    save_two(tmp_path, torch.zeros(4, 4))
    file = tmp_path / "200/.metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = {"rules": LoadRules()}
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        RestoreError, match=r"200/.metadata can't be read by stepkeeper: it names .*LoadRules"
    ):
        restored(tmp_path)
