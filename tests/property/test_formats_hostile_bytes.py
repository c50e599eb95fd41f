"""Files of other programs with bytes changed anywhere: they are converted, or refused with one kind of error."""

import io
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_bytes.changes import Changes, changed, changes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from thoroughness import scaled
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepkeeper_planners.errors import (
    MetadataDecodeError,
    SourceError,
    UnsupportedValueError,
    ValueDecodeError,
)
from stepkeeper_planners.formats import checkpoint_to_torch_save
from stepkeeper_planners.formats.safetensors.source import open_safetensors
from stepkeeper_planners.formats.torch_save.source import open_torch_save

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:TypedStorage is deprecated:UserWarning"
)

STATE = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.zeros(0, 2)}
WORDS = [
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
]
WORDS += [json.dumps(name).encode() for name in ("a", "b", "dtype", "shape", "data_offsets", "__metadata__")]
CHANGES = changes(WORDS)
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=scaled(150))


def read_whole(state: Any) -> None:
    """All that was promised is there."""
    for tensor in state.values():
        if isinstance(tensor, torch.Tensor):
            assert tensor.clone().shape == tensor.shape


@QUICK
@given(CHANGES, st.booleans())
def test_safetensors_changed_anywhere(chosen: Changes, whole: bool) -> None:
    data = save(STATE, {"format": "pt"})
    n_header = 8 + int.from_bytes(data[:8], "little")
    if not whole:
        # The header alone, with the length that it then has.
        header = changed(data[8:n_header], chosen)
        data = len(header).to_bytes(8, "little") + header + data[n_header:]
    else:
        data = changed(data, chosen)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(data)
        with suppress(SourceError):
            read_whole(open_safetensors(path))


@QUICK
@given(CHANGES)
def test_an_index_changed_anywhere(chosen: Changes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x.safetensors").write_bytes(save(STATE))
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(STATE, "x.safetensors")}
        (folder / "x.safetensors.index.json").write_bytes(changed(json.dumps(index).encode(), chosen))
        with suppress(SourceError):
            assert open_safetensors(folder).keys() == STATE.keys()


@QUICK
@given(CHANGES)
def test_a_torch_save_file_changed_anywhere(chosen: Changes) -> None:
    file = io.BytesIO()
    torch.save({**STATE, "n": np.arange(3)}, file)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        path.write_bytes(changed(file.getvalue(), chosen))
        with suppress(SourceError):
            read_whole(open_torch_save(path))


@QUICK
@given(CHANGES, st.sampled_from([".metadata", "__0_0.distcp"]))
def test_a_checkpoint_changed_anywhere(checkpoint: dict[str, bytes], chosen: Changes, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for each, data in checkpoint.items():
            (folder / each).write_bytes(changed(data, chosen) if each == name else data)
        with suppress(SourceError, MetadataDecodeError, ValueDecodeError, UnsupportedValueError):
            checkpoint_to_torch_save(folder, folder / "x.pt")
        assert len(list(folder.iterdir())) == len(checkpoint) + (folder / "x.pt").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small one's files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    dcp_save({**STATE, "n": [1]}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}
