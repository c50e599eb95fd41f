"""torch.save files as checkpoints and back: every value bit for bit, damaged sources refused, nothing left behind."""

import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planners_parts.parts import DTYPES, random_elements
from planners_parts.pickles import Reduced
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import DynamicMetaLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners.errors import MetadataDecodeError, SourceError
from stepkeeper_planners.formats import TorchSaveReader, checkpoint_to_torch_save, torch_save_to_checkpoint

MORE_DTYPES = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def same(left: Any, right: Any, path: str = "state") -> None:
    """Equal, bit for bit and type for type; dicts in any order."""
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        left = left.resolve_conj().contiguous().reshape(-1, 1)
        for a, b in zip(left, right.contiguous().reshape(-1, 1), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        assert {type(key) for key in left} == {type(key) for key in right}, path
        for key, value in left.items():
            same(value, right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert (type(left), len(left)) == (type(right), len(right)), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            same(a, b, f"{path}.{index}")
    else:
        assert type(left) is type(right), path
        np.testing.assert_array_equal(left, right, err_msg=path)


def everything() -> dict[Any, Any]:
    tied = torch.arange(6.0)
    return {
        "dtypes": {str(dtype): random_elements((3, 5), dtype, 0) for dtype in [*DTYPES, *MORE_DTYPES]},
        "model": OrderedDict([("head", tied), ("embedding", tied), ("scalar", torch.tensor(3))]),
        "empty": torch.empty(0, 3, dtype=torch.float64),
        "strided": torch.arange(24.0).reshape(4, 6).t(),
        "part": torch.arange(100)[10:20],
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "optim": {
            "state": {0: {"step": torch.tensor(1.0), "ratio": 2}, 1: {}},
            "param_groups": [{"params": [0, 1], "betas": (0.9, 0.99)}],
        },
        "nothing": {},
        "lists": [[], [torch.ones(1), {"deep": [1, None]}], {}],
        "rng": {"python": random.getstate(), "numpy": np.random.RandomState(1).get_state(legacy=False)},
        "in a tuple": (torch.arange(3, dtype=torch.int16), np.float32(1.5), "x", b"y"),
        7: 8,
    }


@pytest.mark.parametrize("mmap", [True, False])
def test_there_and_back_is_the_same(mmap: bool, tmp_path: Path) -> None:
    after = tmp_path / "after.pt"
    torch.save(everything(), tmp_path / "before.pt")
    torch_save_to_checkpoint(tmp_path / "before.pt", tmp_path / "checkpoint")
    checkpoint_to_torch_save(tmp_path / "checkpoint", after)
    state = torch.load(after, weights_only=False, mmap=mmap)
    same(everything(), state)
    if mmap:
        assert all(tensor.data_ptr() % 64 == 0 for tensor in state["dtypes"].values())
    assert zipfile.ZipFile(after).testzip() is None


def test_what_stock_saved_is_converted(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.arange(5.0), "t": torch.arange(24).reshape(4, 6).t()},
        "lr": [0.1],
        3: {4: "x"},
    }
    save(state, storage_writer=FileSystemWriter(tmp_path / "checkpoint"), no_dist=True)
    # Stored transposed: C's order of its elements isn't that of the file.
    with pytest.raises(SourceError, match=r"^model\.t: .* don't hold the elements in C order"):
        checkpoint_to_torch_save(tmp_path / "checkpoint", tmp_path / "after.pt")
    del state["model"]["t"]  # type: ignore[attr-defined]
    save(state, storage_writer=FileSystemWriter(tmp_path / "second"), no_dist=True)
    checkpoint_to_torch_save(tmp_path / "second", tmp_path / "after.pt")
    # Nothing in what stock writes says that these keys were numbers.
    want = {"model": {"w": torch.arange(5.0)}, "lr": [0.1], "3": {"4": "x"}}
    same(want, torch.load(tmp_path / "after.pt", weights_only=True))


class Stranger:
    def __init__(self) -> None:
        self.open = 1


def wrong_sources(folder: Path) -> dict[str, Path]:
    good = folder / "good.pt"
    torch.save({"a": torch.ones(1000)}, good)
    sources = {
        name: folder / f"{name}.pt"
        for name in ("cut", "empty", "text", "legacy", "zip", "list", "stranger", "sparse", "meta")
    }
    sources["cut"].write_bytes(good.read_bytes()[:2000])
    sources["empty"].write_bytes(b"")
    sources["text"].write_text("PK is how zip files begin", encoding="ascii")
    torch.save({"a": torch.ones(3)}, sources["legacy"], _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(sources["zip"], "w") as archive:
        archive.writestr("a/b", "c")
    torch.save([torch.ones(3)], sources["list"])
    torch.save({"plain": torch.eye(3, 4).to_sparse()}, sources["sparse"])
    torch.save({"plain": torch.empty(3, 4, device="meta")}, sources["meta"])
    torch.save({"model": {"layers": [torch.ones(3), Stranger()]}, "hook": print}, sources["stranger"])
    return sources


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "damaged or cut off"),
        ("empty", "isn't a torch.save file"),
        ("text", "isn't a torch.save file"),
        ("legacy", r"before 1\.6.* torch\.save\(torch\.load\(old, weights_only=True\), new\)"),
        ("zip", "no data.pkl"),
        ("list", "holds a list"),
        ("sparse", "plain"),
        ("meta", "plain"),
        ("stranger", r"at model\.layers\.1: .*Stranger; at hook: .*print"),
    ],
)
def test_a_wrong_source_is_named_and_nothing_written(kind: str, message: str, tmp_path: Path) -> None:
    source = wrong_sources(tmp_path)[kind]
    before = set(tmp_path.iterdir())
    with pytest.raises(SourceError, match=message) as caught:
        torch_save_to_checkpoint(source, tmp_path / "checkpoint")
    assert str(source) in str(caught.value)
    assert set(tmp_path.iterdir()) == before


def test_damaged_checkpoints_are_refused_and_nothing_written(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5000), "v": [1]}, tmp_path / "a.pt")
    folder = tmp_path / "checkpoint"
    with pytest.raises(SourceError, match=r"without \.metadata"):
        checkpoint_to_torch_save(tmp_path / "nowhere", tmp_path / "b.pt")
    torch_save_to_checkpoint(tmp_path / "a.pt", folder)
    (data,) = folder.glob("*.distcp")
    whole = data.read_bytes()
    for broken in (whole[:5000], b"\0" * len(whole)):
        data.write_bytes(broken)
        with pytest.raises(ValueError, match=r"^[wv]: "):
            checkpoint_to_torch_save(folder, tmp_path / "b.pt")
    data.unlink()
    with pytest.raises(SourceError, match="missing"):
        checkpoint_to_torch_save(folder, tmp_path / "b.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(Reduced(Path.touch, (tmp_path / "touched",))))
    with pytest.raises(MetadataDecodeError):
        checkpoint_to_torch_save(folder, tmp_path / "b.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "checkpoint"]


def test_torchs_planner_that_makes_metadata_up_loads_what_our_reader_reads(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(5.0)}, "step": 7}, tmp_path / "a.pt")
    state = {"model": {"w": torch.zeros(5)}}
    load(
        state,
        checkpoint_id=tmp_path / "a.pt",
        storage_reader=TorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        no_dist=True,
    )
    same(torch.arange(5.0), state["model"]["w"])
