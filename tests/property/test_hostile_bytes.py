"""Bytes changed anywhere: read as something harmless, or refused with the one kind of error that names file or key."""

import io
import json
import pickle
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from thoroughness import scaled
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepkeeper.checkpoint.dcp_format.metadata import encode_metadata
from stepkeeper_planners.errors import (
    MetadataDecodeError,
    SourceError,
    UnsupportedValueError,
    ValueDecodeError,
)
from stepkeeper_planners.formats import checkpoint_to_torch_save
from stepkeeper_planners.formats.safetensors.source import open_safetensors
from stepkeeper_planners.formats.torch_save.source import open_torch_save
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata
from stepkeeper_planners.state.values import decode_value, encode_value
from stepkeeper_testing.damage import contents

STATE: Final = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.zeros(0, 2)}
CHUNKS: Final = [ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((2, 3))) for start in (0, 2)]
SAMPLE: Final = Metadata(
    {
        "w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((4, 3)), CHUNKS),
        "step": BytesStorageMetadata(),
    },
    planner_data={"w": ("w",)},
    storage_data={MetadataIndex("w", chunk.offsets): _StorageInfo("__0_0.distcp", 0, 9) for chunk in CHUNKS},
)
VALUE: Final = {
    "a": (1, "x", b"y", 2.5, 1j),
    "n": np.arange(3, dtype="i2"),
    "s": np.float32(1),
    "t": (torch.ones(2),),
}
OPCODES: Final = [
    value
    for name, value in vars(pickle).items()
    if name.isupper() and type(value) is bytes and len(value) == 1
]
WORDS: Final = [
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-",
        b"0",
        b"9" * 30,
        b"F4",
        b"null",
        b"\\ud800",
        b"\0",
        b"\xff",
    ),
    *(json.dumps(name).encode() for name in ("a", "b", "dtype", "shape", "data_offsets", "__metadata__")),
]
QUICK: Final = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=scaled(200))

Changes = list[tuple[int, int, bytes]]
"""Each at a place, of so many bytes, into others."""


def changes(words: list[bytes]) -> st.SearchStrategy[Changes]:
    """A few, into any bytes or one of the words."""
    instead = st.one_of(st.binary(max_size=4), st.sampled_from(words))
    return st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4), instead), min_size=1, max_size=4)


def changed(data: bytes, changes: Changes) -> bytes:
    """Some bytes taken out at each place, others put in."""
    for place, n_bytes, instead in changes:
        at = place % (len(data) + 1)
        data = data[:at] + instead + data[at + n_bytes :]
    return data


def read_whole(state: Any) -> None:
    """All that was promised is there."""
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            assert tensor.clone().shape == tensor.shape


@QUICK
@given(changes(OPCODES), st.integers(2, 5))
def test_metadata_changed_anywhere(chosen: Changes, protocol: int) -> None:
    with suppress(MetadataDecodeError):
        metadata = read_metadata(changed(pickle.dumps(SAMPLE, protocol), chosen), name="m")
        assert type(metadata) is Metadata
        check_metadata(metadata, name="m")


@QUICK
@given(changes(OPCODES), st.booleans())
def test_a_value_changed_anywhere(chosen: Changes, whole: bool) -> None:
    """In the pickle alone, with an archive whose checksums are right, it is for the unpickler to find."""
    data = encode_value("k", VALUE)
    buffer = io.BytesIO(changed(data, chosen))
    if not whole:
        source, buffer = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as target:
            for entry in source.infolist():
                content = source.read(entry)
                is_pickle = "data.pkl" in entry.filename
                target.writestr(entry.filename, changed(content, chosen) if is_pickle else content)
    with suppress(ValueDecodeError):
        encode_value("k", decode_value("k", buffer.getvalue()))


def changed_header(chosen: Changes) -> bytes:
    """Change the header of a safetensors file alone, with the length that it then has."""
    data = save(STATE, {"format": "pt"})
    n_header = 8 + int.from_bytes(data[:8], "little")
    header = changed(data[8:n_header], chosen)
    return len(header).to_bytes(8, "little") + header + data[n_header:]


@QUICK
@given(changes(WORDS))
def test_a_file_of_another_program_changed_anywhere(chosen: Changes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for data in (changed_header(chosen), changed(save(STATE, {"format": "pt"}), chosen)):
            (folder / "x.safetensors").write_bytes(data)
            with suppress(SourceError):
                read_whole(open_safetensors(folder / "x.safetensors"))
        (folder / "x.safetensors").write_bytes(save(STATE))
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(STATE, "x.safetensors")}
        (folder / "x.safetensors.index.json").write_bytes(changed(json.dumps(index).encode(), chosen))
        with suppress(SourceError):
            assert open_safetensors(folder).keys() == STATE.keys()
        torch.save({**STATE, "n": np.arange(3)}, folder / "x.pt")
        (folder / "x.pt").write_bytes(changed((folder / "x.pt").read_bytes(), chosen))
        with suppress(SourceError):
            read_whole(open_torch_save(folder / "x.pt"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small one's files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    dcp_save({**STATE, "n": [1]}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return contents(folder)


@QUICK
@given(changes(WORDS), st.sampled_from([".metadata", "__0_0.distcp"]))
def test_a_checkpoint_changed_anywhere(checkpoint: dict[str, bytes], chosen: Changes, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for each, data in checkpoint.items():
            (folder / each).write_bytes(changed(data, chosen) if each == name else data)
        with suppress(SourceError, MetadataDecodeError, ValueDecodeError, UnsupportedValueError):
            checkpoint_to_torch_save(folder, folder / "x.pt")
        assert len(list(folder.iterdir())) == len(checkpoint) + (folder / "x.pt").exists()


def test_the_bytes_before_any_change_are_read() -> None:
    assert read_metadata(pickle.dumps(SAMPLE), name="m") == SAMPLE
    assert decode_value("k", encode_value("k", VALUE)) is not None
    assert read_metadata(encode_metadata([]), name="m") == Metadata({}, None, {}, None, "1.0.0")
