"""Files of other programs as they may come from anywhere: what they claim is checked before anything relies on it."""

import json
import os
import pickle
import re
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners.errors import SourceError, UnsupportedValueError
from stepkeeper_planners.formats import (
    checkpoint_to_safetensors,
    checkpoint_to_torch_save,
    safetensors_to_checkpoint,
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


def index_of(fqn: str, *offsets: int) -> MetadataIndex:
    return MetadataIndex(fqn, torch.Size(offsets) if offsets else None)


def places(metadata: Metadata) -> dict[MetadataIndex, Any]:
    assert isinstance(metadata.storage_data, dict)
    return metadata.storage_data


def sixty_values(metadata: Metadata) -> None:
    for number in range(60):
        metadata.state_dict_metadata[f"n{number}"] = metadata.state_dict_metadata["n"]
        places(metadata)[index_of(f"n{number}")] = places(metadata)[index_of("n")]


def value_in_tensor(metadata: Metadata) -> None:
    tensor = places(metadata)[index_of("w", 0)]
    places(metadata)[index_of("n")] = replace(tensor, offset=tensor.offset + 1, length=10)


def another_dtype(metadata: Metadata) -> None:
    places(metadata)[index_of("v", 0)] = places(metadata)[index_of("w", 0)]
    stored: Any = metadata.state_dict_metadata["v"]
    stored.properties.dtype = torch.int32


def named(name: str) -> Change:
    def change(metadata: Metadata) -> None:
        found = places(metadata)
        for key in (index_of("w", 0), index_of("n")):
            found[key] = replace(found[key], relative_path=name)

    return change


ODD_PLACES: dict[str, tuple[Change, str]] = {
    "a value in a tensor": (value_in_tensor, "w and n both have bytes"),
    "a folder's name": (named("below"), "[nw]: .* is no file: Is a directory"),
    "60 values on one place": (sixty_values, "n and n0 both have bytes"),
    "a tensor as two dtypes": (another_dtype, "w and v both have bytes"),
    "no character in a name": (named("\0"), "[nw]: .* can't be the name of a file"),
    "a pipe": (named("pipe"), "[nw]: .*/pipe is no file: it is a pipe or a device"),
    "a file that is gone": (named("gone"), r"[nw]: .*/gone is missing; the checkpoint isn't whole"),
    "a path": (named("below/x"), "w: .* names below/x, which isn't a file in this folder"),
}


@pytest.mark.parametrize("case", ODD_PLACES)
def test_metadata_that_names_odd_places_is_refused(case: str, tmp_path: Path) -> None:
    change, message = ODD_PLACES[case]
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


@pytest.mark.parametrize("key", ["\ud800", "a\0b", "a/b", "x" * 5000, "a\nb", "../a", "ümlaut"])
def test_odd_names_of_tensors_come_back(key: str, tmp_path: Path) -> None:
    torch.save({key: torch.ones(3), "deep": {key: [1]}}, tmp_path / "a.pt")
    torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "c")
    checkpoint_to_torch_save(tmp_path / "c", tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt")
    assert torch.equal(state[key], torch.ones(3))
    assert state["deep"] == {key: [1]}


def test_views_that_would_become_many_times_the_file_are_refused(tmp_path: Path) -> None:
    buffer = torch.arange(100_000.0)
    torch.save({"all": buffer, "first": buffer[:50_000], "last": buffer[50_000:]}, tmp_path / "views.pt")
    assert torch_save_to_checkpoint(tmp_path / "views.pt", tmp_path / "c").tensor_bytes == 800_000
    torch.save({f"w{start:02}": buffer[start:] for start in range(30)}, tmp_path / "windows.pt")
    with pytest.raises(SourceError, match=r"windows\.pt: its tensors share their elements: .* w00"):
        torch_save_to_checkpoint(tmp_path / "windows.pt", tmp_path / "d")
    assert not (tmp_path / "d").exists()


MIB = 1 << 20


def described(start: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(path: Path, header: object, data: bytes = b"\0" * 16, claimed_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if claimed_bytes is None else claimed_bytes
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return path


WHOLE = json.dumps(described(0, 16))


HEADERS = {
    "a list": ([1], "its header is no object"),
    "three offsets": ({"w": described(0, 16) | {"data_offsets": [0, 8, 16]}}, "w has no data_offsets"),
    "a name twice": (f'{{"w":{WHOLE},"w":{WHOLE}}}'.encode(), "w stands twice"),
    "over each other": ({"v": described(0, 12), "w": described(8, 16)}, "v and w lie over each other"),
    "a hole": ({"w": described(0, 8)}, "bytes 8 to 16 behind the header belong to no tensor"),
    "behind the end": ({"w": described(0, 20)}, "w should end at byte 20 .* where the file has 16"),
    "more than 64 bits": ({"w": described(0, 16, [2**62, 2**62])}, "w has a shape of more elements"),
    "a truth as a size": ({"w": described(0, 4, [True]), "v": described(4, 16)}, "w has no shape"),
    "another shape": ({"w": described(0, 16, [5])}, r"w needs 20 bytes for shape \[5\] of F32, and has 16"),
    "no dtype of anybody": ({"w": described(0, 16, dtype="F3")}, "w has dtype F3"),
    "more than is known": ({"w": described(0, 16) | {"quantized": True}}, "w isn't described by"),
    "half a character": (b'{"w\\ud800":%s}' % WHOLE.encode(), r"'w\\ud800' has half a character in its name"),
    "deep": (b"[" * 100_000, "its header is no JSON"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(case: str, tmp_path: Path) -> None:
    header, message = HEADERS[case]
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(SourceError, match=f"^{re.escape(str(path))}.*{message}"):
        safetensors_to_checkpoint(path, tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("claimed_bytes", [300 * MIB, 2**40, 2**64 - 1])
def test_a_header_that_claims_more_than_there_is_takes_no_memory(claimed_bytes: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"w": described(0, 16)}, claimed_bytes=claimed_bytes)
    tracemalloc.start()
    try:
        with pytest.raises(
            SourceError, match=rf"x\.safetensors .* its header should have {claimed_bytes} bytes"
        ):
            safetensors_to_checkpoint(path, tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < MIB
        with path.open("r+b") as file:
            file.truncate(400 * MIB)
        if claimed_bytes == 300 * MIB:
            with pytest.raises(SourceError, match=r"its header has \d+ bytes, more than 100000000"):
                safetensors_to_checkpoint(path, tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("padding", [b"", b" ", b"   "])
def test_elements_may_start_anywhere(padding: bytes, tmp_path: Path) -> None:
    """Read elements where writers of other languages, and old ones of this one, put them."""
    want = torch.tensor([1.5, -2.0, 3.0])
    header = {"__metadata__": {"by": "x"}, "b": described(0, 1, [1], "BOOL"), "w": described(1, 13)}
    text = json.dumps(header).encode() + padding
    path = write(tmp_path / "x.safetensors", text, b"\1" + want.numpy().tobytes())
    safetensors_to_checkpoint(path, tmp_path / "c")
    checkpoint_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt")
    assert torch.equal(state["w"], want)
    assert state["b"].item() is True


INDICES = {
    "no tensor": ({"weight_map": {}}, "the weight_map names no tensor"),
    "deep": (b"[" * 200_000, "no weight_map"),
    "a tensor twice": (b'{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}', "a stands there twice"),
    "the folder": ({"weight_map": {"a": ".."}}, r"has \.\. for a, which is no file beside it"),
    "a file that is missing": (
        {"weight_map": {"a": "gone.safetensors"}},
        r"^a: .*/gone\.safetensors is missing",
    ),
    "another name": (
        {"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}},
        "differ in b2, c",
    ),
    "swapped files": (
        {"weight_map": {"a": "b.safetensors", "b": "a.safetensors", "b2": "a.safetensors"}},
        r"a is in b\.safetensors, but it is in a\.safetensors",
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


def test_a_name_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    torch.save({"a\ud800": torch.ones(3)}, tmp_path / "a.pt")
    torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match=r"^'a\\ud800': no tensor can be named"):
        checkpoint_to_safetensors(tmp_path / "c", tmp_path / "c.safetensors")
    done = checkpoint_to_safetensors(tmp_path / "c", tmp_path / "c.safetensors", rename=lambda _: "a")
    assert done.tensors == ("a\ud800",)
