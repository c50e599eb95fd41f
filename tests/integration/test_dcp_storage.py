"""stepkeeper.dcp in torch's own dcp.save, async_save and load, beside torch's own writer and reader."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from stepkeeper import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper.dcp import StorageReader, StorageWriter
from stepkeeper.errors import TornCheckpointError
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.damage import flip

FOLDER = Path(__file__).parent / "dcp_storage"
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def make_state(fill: float = 0.0) -> dict[str, Any]:
    """Tensors of all kinds that lie on a host, one of them large enough to be cut, and values."""
    fill = float(fill)
    cut = torch.arange(5000 * 1000, dtype=torch.float32).reshape(5000, 1000) + fill
    model = {
        "cut": cut,
        "tied": cut,
        "turned": torch.arange(12.0).reshape(3, 4).t() + fill,
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(3 + fill),
        "half": torch.arange(700).bfloat16() + fill,
        "bool": torch.arange(9) % 2 == int(fill) % 2,
        "complex": torch.complex(torch.arange(5.0), torch.full((5,), fill)).conj(),
    }
    return {"model": model, "layers": [torch.full((2, 3), fill + i) for i in range(3)], "step": int(fill)}


def check_state(found: dict[str, Any], fill: float) -> None:
    wanted = make_state(fill)
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert all(map(torch.equal, found["layers"], wanted["layers"]))
    assert found["step"] == int(fill)


def loader(whose: str) -> LoadPlanner | None:
    return SPMDLoadPlanner() if whose == "ours" else None


@pytest.mark.smoke
@pytest.mark.parametrize(("writer", "reader"), [("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")])
@pytest.mark.parametrize("planner", ["ours", "theirs"])
def test_what_one_writes_the_other_reads(tmp_path: Path, writer: str, reader: str, planner: str) -> None:
    folder = tmp_path / "my runs" / "step 5"
    save(
        make_state(5.0),
        storage_writer=StorageWriter(folder) if writer == "ours" else FileSystemWriter(folder),
        planner=SPMDSavePlanner() if planner == "ours" else None,
    )
    other = "theirs" if planner == "ours" else "ours"
    for load_planner in (loader(planner), loader(other)):
        found = make_state()
        load(
            found,
            storage_reader=StorageReader(folder) if reader == "ours" else FileSystemReader(folder),
            planner=load_planner,
        )
        check_state(found, 5.0)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_flipped_bit_in_the_metadata_is_noticed(tmp_path: Path, part: float) -> None:
    save({"w": torch.arange(4000.0), "n": 3}, storage_writer=StorageWriter(tmp_path))
    metadata = tmp_path / ".metadata"
    flip(metadata, int(metadata.stat().st_size * part))
    with pytest.raises(TornCheckpointError, match=r"\.metadata"):
        StorageReader(tmp_path).read_metadata()


def test_hosts_that_do_not_see_one_folder_make_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StorageWriter.write_data

    def write_elsewhere(writer: StorageWriter, *arguments: Any) -> Any:
        written = write(writer, *arguments)
        next(tmp_path.glob("*.distcp")).unlink()
        return written

    monkeypatch.setattr(StorageWriter, "write_data", write_elsewhere)
    with pytest.raises(CheckpointException, match="all hosts must share one folder"):
        save({"n": 3}, storage_writer=StorageWriter(tmp_path, patience=Patience(total_s=0)))
    assert not list(tmp_path.iterdir())


@pytest.mark.smoke
def test_ranks_save_and_load_each_others_dtensors(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(FOLDER / "ranks.py", 2, tmp_path)


@pytest.mark.smoke
def test_killed_anywhere_what_can_be_read_is_whole(torch_server: ForkServer, tmp_path: Path) -> None:
    done = torch_server.run([FOLDER / "killed.py", tmp_path], timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    shutil.rmtree(tmp_path)


def test_every_torch_knows_the_properties_of_a_tensor(tmp_path: Path) -> None:
    """torch up to 2.14 refuses a sixth one, which 2.15 makes, and with it all of the checkpoint."""
    save({"w": torch.ones(3, 2).t()}, storage_writer=StorageWriter(tmp_path), no_dist=True)
    seen: list[int] = []

    class Properties:
        def __setstate__(self, state: tuple[Any, ...]) -> None:
            seen.append(len(state))

    class Unpickler(pickle.Unpickler):
        @override
        def find_class(self, module: str, name: str, /) -> Any:
            return Properties if name == "TensorProperties" else super().find_class(module, name)

    with (tmp_path / ".metadata").open("rb") as file:
        Unpickler(file).load()
    assert seen == [5]
