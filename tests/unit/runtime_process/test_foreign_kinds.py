"""Test other writers' items of kinds that aren't read here: they are named, and no older step is taken."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from stepkeeper.errors import RestoreError
from stepkeeper.restore.foreign.choosing import choose_foreign_step
from stepkeeper.restore.foreign.loading import ForeignLoading
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Scaled(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is pickled by a name under which it is found."""
    monkeypatch.setattr(Scaled, "__module__", "torch")
    monkeypatch.setattr(torch, "Scaled", Scaled, raising=False)


class AsItIs(StreamTransformExtension):
    """The least of a compression that a reader uses."""

    @staticmethod
    @override
    def registry_name() -> str:
        return "stream.as_it_is"

    @staticmethod
    @override
    def from_descriptor(version: str) -> "AsItIs":
        return AsItIs()

    @override
    def get_descriptor(self) -> str:
        return "stream.as_it_is/1"

    @override
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return output

    @override
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return input


def add(bucket: MemoryBucket, folder: Path) -> None:
    for each in folder.iterdir():
        bucket.objects[f"{folder.name}/{each.name}"] = each.read_bytes()


def load(bucket: MemoryBucket, rules: LoadRules | None = None) -> dict[str, Any]:
    """The newest step, as a rank loads it."""
    base = choose_foreign_step(MemoryStore(bucket), lambda: MemoryStore(bucket))
    assert base is not None
    state: dict[str, Any] = {"w": torch.zeros(4, 4), "b": torch.zeros(100)}
    loading = ForeignLoading(
        MemoryStore(bucket), base.folder, LoadTarget(state), Ranks(rank=0, world_size=1), rules=rules
    )
    loading.compare_state()
    loading.read_values()
    loading.fill_tensors()
    loading.scatter_values()
    return state


def of_a_class(path: Path) -> None:
    save({"w": torch.eye(4).as_subclass(Scaled), "b": torch.ones(100)}, checkpoint_id=path, no_dist=True)


def compressed(path: Path) -> None:
    writer = FileSystemWriter(path, _extensions=[AsItIs()])
    save({"w": torch.eye(4), "b": torch.ones(100)}, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (of_a_class, "it names torch.Scaled, which has no place in it"),
        (compressed, "it was stored compressed or otherwise changed (['stream.as_it_is/1'])"),
    ],
    ids=["class", "compressed"],
)
def test_a_tensor_that_is_not_read_is_named_and_the_step_is_not_passed_over(
    tmp_path: Path, write: Callable[[Path], None], said: str
) -> None:
    bucket = MemoryBucket()
    save({"w": torch.zeros(4, 4), "b": torch.zeros(100)}, checkpoint_id=tmp_path / "100", no_dist=True)
    write(tmp_path / "200")
    add(bucket, tmp_path / "100")
    add(bucket, tmp_path / "200")
    with pytest.raises(RestoreError) as raised:
        load(bucket)
    told = str(raised.value)
    assert f"/200: w can't be read by stepkeeper: {said}" in told
    assert "exclude=['w']" in told
    assert "dcp.load" in told
    if write is of_a_class:
        assert torch.equal(load(bucket, LoadRules(exclude=["w"]))["b"], torch.ones(100))


def test_metadata_that_names_what_is_not_read_is_no_reason_to_go_back(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    for step in ("100", "200"):
        save({"w": torch.zeros(4, 4), "b": torch.ones(100)}, checkpoint_id=tmp_path / step, no_dist=True)
        add(bucket, tmp_path / step)
    metadata = pickle.loads(bucket.objects["200/.metadata"])
    metadata.planner_data = {"rules": LoadRules()}
    bucket.objects["200/.metadata"] = pickle.dumps(metadata)
    with pytest.raises(
        RestoreError, match=r"200/.metadata can't be read by stepkeeper: it names .*LoadRules"
    ):
        load(bucket)
