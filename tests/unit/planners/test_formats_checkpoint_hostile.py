"""Checkpoints as they may come from anywhere: a place in a file stands for one thing, and names are odd."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners.errors import SourceError, UnsupportedValueError
from stepkeeper_planners.formats import (
    checkpoint_to_safetensors,
    checkpoint_to_torch_save,
    torch_save_to_checkpoint,
)

Change = Callable[[Metadata], None]


def changed(folder: Path, change: Change) -> Path:
    """A checkpoint of stock torch, of which the metadata says something else."""
    state = {"w": torch.ones(4), "v": torch.zeros(4), "n": [1], "m": [2]}
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def index(fqn: str, *offsets: int) -> MetadataIndex:
    return MetadataIndex(fqn, torch.Size(offsets) if offsets else None)


def places(metadata: Metadata) -> dict[MetadataIndex, Any]:
    assert isinstance(metadata.storage_data, dict)
    return metadata.storage_data


def sixty_values(metadata: Metadata) -> None:
    for number in range(60):
        metadata.state_dict_metadata[f"n{number}"] = metadata.state_dict_metadata["n"]
        places(metadata)[index(f"n{number}")] = places(metadata)[index("n")]


def value_in_tensor(metadata: Metadata) -> None:
    tensor = places(metadata)[index("w", 0)]
    places(metadata)[index("n")] = replace(tensor, offset=tensor.offset + 1, length=10)


def another_dtype(metadata: Metadata) -> None:
    places(metadata)[index("v", 0)] = places(metadata)[index("w", 0)]
    stored: Any = metadata.state_dict_metadata["v"]
    stored.properties.dtype = torch.int32


def named(name: str) -> Change:
    def change(metadata: Metadata) -> None:
        found = places(metadata)
        for key in (index("w", 0), index("n")):
            found[key] = replace(found[key], relative_path=name)

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "60 values on one place": (sixty_values, "n and n0 both have bytes"),
    "a value in a tensor": (value_in_tensor, "w and n both have bytes"),
    "a tensor as two dtypes": (another_dtype, "w and v both have bytes"),
    "no character in a name": (named("\0"), "[nw]: .* can't be the name of a file"),
    "half a character in a name": (named("\ud800"), "[nw]: .* can't be the name of a file"),
    "a long name": (named("x" * 300), "[nw]: .* is no file: File name too long"),
    "a folder's name": (named("below"), "[nw]: .* is no file: Is a directory"),
    "a pipe": (named("pipe"), "[nw]: .*/pipe is no file: it is a pipe or a device"),
    "a file that is gone": (named("gone"), r"[nw]: .*/gone is missing; the checkpoint isn't whole"),
    "a path": (named("below/x"), "w: .* names below/x, which isn't a file in this folder"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_metadata_that_names_odd_places_is_refused(case: str, tmp_path: Path) -> None:
    change, message = HOSTILE[case]
    folder = changed(tmp_path / "c", change)
    (folder / "below").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    for convert in (checkpoint_to_torch_save, partial(checkpoint_to_safetensors, values="leave_out")):
        with pytest.raises(SourceError, match=message) as caught:
            convert(folder, tmp_path / "x.safetensors")
        assert str(folder) in str(caught.value)
        str(caught.value).encode()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor([1 + 2j, 3 - 1j]).conj(), id="conjugated"),
        pytest.param(torch._neg_view(torch.ones(2)), id="negated"),
    ],
)
def test_elements_that_stand_otherwise_than_they_are_meant_are_refused(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    """Stock torch notes beside the elements of such a tensor what is still to be done with them."""
    save({"w": tensor}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    with pytest.raises(SourceError, match=r"^w: .* in another order or form than C's"):
        checkpoint_to_torch_save(tmp_path / "c", tmp_path / "x.pt")


@pytest.mark.parametrize("key", ["\ud800", "a\0b", "a/b", "x" * 5000, "a\nb", "../a", "ümlaut"])
def test_odd_names_of_tensors_come_back(key: str, tmp_path: Path) -> None:
    torch.save({key: torch.ones(3), "deep": {key: [1]}}, tmp_path / "a.pt")
    torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "c")
    checkpoint_to_torch_save(tmp_path / "c", tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt")
    assert torch.equal(state[key], torch.ones(3))
    assert state["deep"] == {key: [1]}


def test_a_name_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    torch.save({"a\ud800": torch.ones(3)}, tmp_path / "a.pt")
    torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match=r"^'a\\ud800': no tensor can be named"):
        checkpoint_to_safetensors(tmp_path / "c", tmp_path / "c.safetensors")
    done = checkpoint_to_safetensors(tmp_path / "c", tmp_path / "c.safetensors", rename=lambda _: "a")
    assert done.tensors == ("a\ud800",)


def test_views_that_would_become_many_times_the_file_are_refused(tmp_path: Path) -> None:
    buffer = torch.arange(100_000.0)
    torch.save({"all": buffer, "first": buffer[:50_000], "last": buffer[50_000:]}, tmp_path / "views.pt")
    assert torch_save_to_checkpoint(tmp_path / "views.pt", tmp_path / "c").tensor_bytes == 800_000
    torch.save({f"w{start:02}": buffer[start:] for start in range(30)}, tmp_path / "windows.pt")
    with pytest.raises(SourceError, match=r"windows\.pt: its tensors share their elements: .* w00"):
        torch_save_to_checkpoint(tmp_path / "windows.pt", tmp_path / "d")
    assert not (tmp_path / "d").exists()
