"""safetensors files, in Hugging Face's layout, as checkpoints and back."""

import json
import os
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.parts import parts_in, parts_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.errors import DuplicateNameError, SourceError, UnsupportedValueError
from stepkeeper_planners.formats import (
    checkpoint_reader,
    checkpoint_to_safetensors,
    checkpoint_to_torch_save,
    safetensors_to_checkpoint,
)
from stepkeeper_planners.formats.checkpoint_files import LocalFolder
from stepkeeper_planners.formats.safetensors.source import open_safetensors
from stepkeeper_planners.geometry.boxes import Box

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    """Make weights of every dtype that safetensors has, of odd sizes, 0-dim and empty."""
    by_dtype = {str(dtype): (torch.arange(15) % 7).to(dtype).reshape(3, 5) for dtype in DTYPES}
    return {**by_dtype, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "ümlaut": torch.ones(1)}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        if tensor.numel():
            bits = (tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
            assert torch.equal(*bits), name


def write_checkpoint(state: dict[str, Any], folder: Path) -> Path:
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("max_shard_bytes", [None, 150, 1])
def test_there_and_back_is_the_same(max_shard_bytes: int | None, tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "first.safetensors")
    safetensors_to_checkpoint(tmp_path / "first.safetensors", tmp_path / "one", prefix="model")
    checkpoint_to_safetensors(
        tmp_path / "one", tmp_path / "files", prefix="model", max_shard_bytes=max_shard_bytes
    )
    safetensors_to_checkpoint(tmp_path / "files", tmp_path / "two")
    done = checkpoint_to_safetensors(tmp_path / "two", tmp_path / "last.safetensors")
    same(weights(), load_file(tmp_path / "last.safetensors"))
    assert done.tensor_bytes == sum(tensor.nbytes for tensor in weights().values())


def test_the_library_and_stock_read_what_is_written(tmp_path: Path) -> None:
    state = write_checkpoint({"model": weights()}, tmp_path / "checkpoint")
    done = checkpoint_to_safetensors(state, tmp_path / "files", prefix="model", max_shard_bytes=200)
    index = json.loads((tmp_path / "files" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    n_files = len(done.files) - 1
    assert n_files > 2
    assert index["metadata"]["total_size"] == done.tensor_bytes
    read: dict[str, torch.Tensor] = {}
    for number in range(1, n_files + 1):
        path = tmp_path / "files" / f"model-{number:05}-of-{n_files:05}.safetensors"
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        part = load_file(path)
        assert {index["weight_map"][name] for name in part} == {path.name}
        assert sum(tensor.nbytes for tensor in part.values()) <= 200
        read.update(part)
    same(weights(), read)
    for planner in (None, SPMDLoadPlanner()):
        got = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        reader = HuggingFaceStorageReader(str(tmp_path / "files"))
        load(got, storage_reader=reader, planner=planner, no_dist=True)
        same(weights(), got)


def test_names_are_selected_and_changed(tmp_path: Path) -> None:
    state = {
        "model": {"a.w": torch.ones(1), "b.w": torch.zeros(2)},
        "models": {"x": torch.ones(3)},
        "step": 5,
    }
    write_checkpoint(state, tmp_path / "c")
    done = checkpoint_to_safetensors(
        tmp_path / "c",
        tmp_path / "c.safetensors",
        prefix="model",
        rename=lambda name: None if name.startswith("b") else f"net.{name}",
    )
    same({"net.a.w": torch.ones(1)}, load_file(tmp_path / "c.safetensors"))
    assert done.tensors == ("model.a.w",)
    assert set(done.left_out) == {"model.b.w", "models.x", "step"}
    back = safetensors_to_checkpoint(
        tmp_path / "c.safetensors",
        tmp_path / "d",
        prefix="model",
        rename=lambda name: name.removeprefix("net."),
    )
    assert back.tensors == ("net.a.w",)
    checkpoint_to_torch_save(tmp_path / "d", tmp_path / "d.pt")
    same({"a.w": torch.ones(1)}, torch.load(tmp_path / "d.pt")["model"])
    with pytest.raises(DuplicateNameError, match=r"'model\.a\.w' and 'model\.b\.w' both become 'same'"):
        checkpoint_to_safetensors(tmp_path / "c", tmp_path / "e", prefix="model", rename=lambda _: "same")
    with pytest.raises(SourceError, match=r"no tensor below 'nothing'; it has model\.a\.w"):
        checkpoint_to_safetensors(tmp_path / "c", tmp_path / "e", prefix="nothing")
    assert not (tmp_path / "e").exists()


def test_values_are_left_out_on_request_only(tmp_path: Path) -> None:
    write_checkpoint({"w": torch.ones(1), "step": 5, "lr": [0.1]}, tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match=r'step, lr.*values="leave_out"'):
        checkpoint_to_safetensors(tmp_path / "c", tmp_path / "c.safetensors")
    done = checkpoint_to_safetensors(tmp_path / "c", tmp_path / "c.safetensors", values="leave_out")
    assert done.left_out == ("step", "lr")


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    write_checkpoint({"fine": torch.ones(1), "wide": torch.ones(1, dtype=torch.complex128)}, tmp_path / "c")
    for dst in ("c.safetensors", "folder"):
        with pytest.raises(UnsupportedValueError, match=r"^wide: safetensors has no complex128"):
            checkpoint_to_safetensors(tmp_path / "c", tmp_path / dst)
        assert not (tmp_path / dst).exists()


@pytest.mark.parametrize("buffer_bytes", [1, 50, 1 << 20])
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(((0, 7), (0, 5), (0, 3)), id="whole"),
        pytest.param(((0, 2, 7), (0, 5), (0, 3)), id="rows"),
        pytest.param(((0, 7), (0, 1, 5), (0, 3)), id="columns"),
        pytest.param(((0, 3, 6, 7), (0, 2, 5), (0, 1, 2, 3)), id="all ways"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex128])
def test_chunks_are_put_together(
    dtype: torch.dtype,
    cuts: tuple[tuple[int, ...], ...],
    buffer_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.arange(105).reshape(7, 5, 3).to(dtype)
    boxes = [
        Box(offsets=tuple(start for start, _ in cell), sizes=tuple(end - start for start, end in cell))
        for cell in product(*(list(pairwise(places)) for places in cuts))
    ]
    parts = parts_of(boxes[::-1], (7, 5, 3), dtype)
    for box, part in parts_in(parts):
        part.copy_(tensor[box.slices])
    save({"w": parts}, storage_writer=FileSystemWriter(tmp_path), planner=SPMDSavePlanner(), no_dist=True)
    monkeypatch.setattr(checkpoint_reader, "BUFFER_BYTES", buffer_bytes)
    pieces = [
        bytes(piece) for piece in checkpoint_reader.open_checkpoint(LocalFolder(tmp_path)).read_elements("w")
    ]
    assert b"".join(pieces) == tensor.numpy().tobytes()
    row_bytes = 5 * 3 * dtype.itemsize
    assert max(map(len, pieces)) <= max(buffer_bytes, row_bytes)


def test_a_file_may_be_larger_than_memory_and_a_pipe_is_refused(tmp_path: Path) -> None:
    n_bytes = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    header = json.dumps({"w": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}).encode()
    large = tmp_path / "large.safetensors"
    large.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(large, 8 + len(header) + n_bytes)
    assert open_safetensors(large)["w"].shape == (n_bytes,)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(SourceError, match=r"pipe.safetensors isn't a regular file"):
        open_safetensors(tmp_path / "pipe.safetensors")
