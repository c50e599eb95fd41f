"""Files of other programs as they may come from anywhere: what they claim is checked before anything relies on it."""

import json
import pickle
import re
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as serialize
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.formats import (
    checkpoint_to_safetensors,
    checkpoint_to_torch_save,
    safetensors_to_checkpoint,
    torch_save_to_checkpoint,
)


def naming(folder: Path, name: str) -> Path:
    """A checkpoint of stock torch, of which the metadata names another file."""
    save({"w": torch.ones(4), "n": [1]}, storage_writer=FileSystemWriter(folder), no_dist=True)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, relative_path=name)
    path.write_bytes(pickle.dumps(metadata))
    return folder


ODD_PLACES = {
    "a folder": ("below", "[nw]: .* isn't a file: .*Is a directory"),
    "no character in a name": ("\0", "[nw]: .* isn't a file: embedded null byte"),
    "a file that is gone": ("gone", r"[nw]: .*/gone is missing; the checkpoint is incomplete"),
    "a path": ("below/x", "w: .* names below/x, which isn't a file in this folder"),
}


@pytest.mark.parametrize(("name", "message"), ODD_PLACES.values(), ids=ODD_PLACES)
def test_metadata_that_names_odd_places_is_refused(name: str, message: str, tmp_path: Path) -> None:
    folder = naming(tmp_path / "c", name)
    (folder / "below").mkdir()
    for convert in (checkpoint_to_torch_save, partial(checkpoint_to_safetensors, values="leave_out")):
        with pytest.raises(SourceError, match=message) as caught:
            convert(folder, tmp_path / "x.safetensors")
        assert str(folder) in str(caught.value)
        str(caught.value).encode()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("key", ["\ud800", "a\0b", "a/b", "x" * 5000, "a\nb", "../a", "ümlaut"])
def test_odd_names_of_tensors_come_back(key: str, tmp_path: Path) -> None:
    torch.save({key: torch.ones(3), "deep": {key: [1]}}, tmp_path / "a.pt")
    torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "c")
    checkpoint_to_torch_save(tmp_path / "c", tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt")
    assert torch.equal(state[key], torch.ones(3))
    assert state["deep"] == {key: [1]}


def described(start: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file_of(header: object, data: bytes = b"\0" * 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


DAMAGED = {
    "a list": file_of([1]),
    "over each other": file_of({"v": described(0, 12), "w": described(8, 16)}),
    "a hole": file_of({"w": described(0, 8)}),
    "behind the end": file_of({"w": described(0, 20)}),
    "more than 64 bits": file_of({"w": described(0, 16, [2**62, 2**62])}),
    "a dtype that torch lacks": file_of(
        {"w": described(0, 12, [16], dtype="F6_E2M3"), "v": described(12, 16)}
    ),
    "deep": file_of(b"[" * 100_000),
    "cut off": serialize({"a": torch.ones(1000)})[:-1],
    "empty": b"",
    "text": b"x" * 100,
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_contradicts_itself_or_is_cut_off_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(
        SourceError, match=f"^{re.escape(str(path))} isn't a safetensors file, or is damaged or cut off"
    ):
        safetensors_to_checkpoint(path, tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_file_that_is_not_there_and_a_folder_without_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no"):
        safetensors_to_checkpoint(tmp_path / "nowhere.safetensors", tmp_path / "c")
    (tmp_path / "bare").mkdir()
    with pytest.raises(SourceError, match=r"no \.safetensors file"):
        safetensors_to_checkpoint(tmp_path / "bare", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_elements_may_start_anywhere(tmp_path: Path) -> None:
    """Read elements where writers of other languages, and old ones of this one, put them."""
    want = torch.tensor([1.5, -2.0, 3.0])
    header = {"__metadata__": {"by": "x"}, "b": described(0, 1, [1], "BOOL"), "w": described(1, 13)}
    text = json.dumps(header).encode() + b" "
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(text, b"\1" + want.numpy().tobytes()))
    safetensors_to_checkpoint(path, tmp_path / "c")
    checkpoint_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt")
    assert torch.equal(state["w"], want)
    assert state["b"].item() is True


INDICES = {
    "no tensor": ({"weight_map": {}}, "the weight_map names no tensor"),
    "deep": (b"[" * 200_000, "no weight_map"),
    "the folder": ({"weight_map": {"a": ".."}}, r"has \.\. for a, which isn't a file beside it"),
    "a file that is missing": (
        {"weight_map": {"a": "gone.safetensors"}},
        r"/gone\.safetensors is missing",
    ),
    "another name": (
        {"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}},
        "differ in b2, c",
    ),
    "swapped files": (
        {"weight_map": {"a": "b.safetensors", "b": "a.safetensors", "b2": "a.safetensors"}},
        "differ in a, b, b2",
    ),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_is_none_or_wrong_is_refused(case: str, tmp_path: Path) -> None:
    document, message = INDICES[case]
    (tmp_path / "folder.safetensors").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(2), "b2": torch.zeros(2)}, tmp_path / "b.safetensors")
    index = tmp_path / "x.safetensors.index.json"
    index.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    with pytest.raises(SourceError, match=message) as caught:
        safetensors_to_checkpoint(index, tmp_path / "c")
    assert str(tmp_path) in str(caught.value)
    str(caught.value).encode()
    assert not (tmp_path / "c").exists()
