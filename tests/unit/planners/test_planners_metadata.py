"""`.metadata` read without running it: of every torch since 2.1, and of nobody else."""

import copyreg
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.pickles import Reduced
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SafeFileSystemReader, SafeFsspecReader
from stepkeeper_planners.errors import MetadataDecodeError
from stepkeeper_planners.pickles.dcp_metadata import check_metadata, read_metadata


def sample() -> stock.Metadata:
    """A tensor of two chunks and a value, as FileSystemWriter of torch 2.9 leaves them."""
    chunks = [
        stock.ChunkStorageMetadata(offsets=torch.Size((start, 0)), sizes=torch.Size((2, 3)))
        for start in (0, 2)
    ]
    properties = stock.TensorProperties(dtype=torch.bfloat16)
    storage = {
        stock.MetadataIndex("w", chunk.offsets, place): _StorageInfo(f"__{place}_0.distcp", 0, 100)
        for place, chunk in enumerate(chunks)
    }
    storage[stock.MetadataIndex("step")] = _StorageInfo("__0_0.distcp", 100, 7, ["zstd"])
    return stock.Metadata(
        state_dict_metadata={
            "w": stock.TensorStorageMetadata(properties, torch.Size((4, 3)), chunks),
            "step": stock.BytesStorageMetadata(),
        },
        planner_data={"w": ("w",), "step": ("step",), "x.0": ("x", 0)},
        storage_data=storage,
        storage_meta=stock.StorageMeta(checkpoint_id="here", save_id="1", modules=["a"]),
        version="1.0.0",
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes_is_read(protocol: int) -> None:
    metadata = read_metadata(pickle.dumps(sample(), protocol), name="f")
    assert metadata == sample()
    assert {key.index for key in metadata.storage_data} == {0, 1, None}
    check_metadata(metadata, name="f")


def test_every_dtype_layout_and_memory_format() -> None:
    for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
            properties = stock.TensorProperties(dtype, torch.sparse_coo, True, memory_format, True)
            entry = stock.TensorStorageMetadata(properties, torch.Size(()), [])
            data = pickle.dumps(stock.Metadata({"w": entry}))
            assert read_metadata(data, name="f").state_dict_metadata["w"] == entry


def test_a_field_that_a_newer_torch_has_is_kept() -> None:
    metadata = sample()
    vars(metadata)["newer"] = [1]
    assert vars(read_metadata(pickle.dumps(metadata), name="f"))["newer"] == [1]


@pytest.mark.parametrize("further", [(), (None,), ((3, 1),), ((3, 1), "newer")], ids=repr)
def test_properties_of_a_tensor_as_older_and_newer_torch_has_them(
    further: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five up to torch 2.14, then the strides too."""
    wanted = sample().state_dict_metadata["w"]
    first = wanted.properties.__getstate__()[:5]  # type: ignore[union-attr]
    with monkeypatch.context() as patched:
        patched.setattr(stock.TensorProperties, "__getstate__", lambda _: (*first, *further))
        data = pickle.dumps(sample())
    read = read_metadata(data, name="f").state_dict_metadata["w"]
    assert isinstance(read, stock.TensorStorageMetadata)
    known = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
    assert [getattr(read.properties, name) for name in known] == [
        torch.bfloat16,
        torch.strided,
        False,
        torch.contiguous_format,
        False,
    ]
    assert getattr(read.properties, "strides", None) in (None, *further[:1])


def test_members_of_an_enum_by_name() -> None:
    """Read members as Python 3.11.0 to 3.11.3 wrote them."""
    properties = stock.TensorProperties()
    pickler = pickle.Pickler(buffer := io.BytesIO(), 2)
    kind = stock._MEM_FORMAT_ENCODING
    by_name: dict[type, Any] = {kind: lambda member: (getattr, (kind, member.name))}
    pickler.dispatch_table = copyreg.dispatch_table | by_name
    pickler.dump(stock.Metadata({"w": stock.TensorStorageMetadata(properties, torch.Size(()), [])}))
    assert b"getattr" in buffer.getvalue()
    entry = read_metadata(buffer.getvalue(), name="f").state_dict_metadata["w"]
    assert isinstance(entry, stock.TensorStorageMetadata)
    assert entry.properties == properties


# Each would make the folder "ran", or change a class, if anything of it was run.
HOSTILE: dict[str, Any] = {
    "a command": Reduced(os.system, ("mkdir ran",)),
    "getattr of a class": Reduced(getattr, (stock.Metadata, "__init__")),
    "a name of torch": Reduced(torch.load, ("ran",)),
    "as an instance": Reduced(stock.BytesStorageMetadata, (), {"x": Reduced(os.mkdir, ("ran",))}),
    "in metadata": stock.Metadata({}, planner_data=Reduced(os.mkdir, ("ran",))),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_run(
    value: object, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MetadataDecodeError, match=r"run/\.metadata"):
        read_metadata(pickle.dumps(value, protocol), name="run/.metadata")
    assert not list(tmp_path.iterdir())


# Written by hand: what no pickler makes. Classes must come out as they were.
HAND_MADE = {
    "a dtype is called": b"\x80\x02ctorch\nfloat32\n)R.",
    "something outside": b"\x80\x02X\1\0\0\0aQ.",
    "an item of a number": b"\x80\x02K\1NNs.",
    "too much on the stack": b"\x80\x02NN.",
    "a class gets a state": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}X\1\0\0\0aK\1sb.",
    "an instance gets two states": b"\x80\x02ctorch.distributed.checkpoint.metadata\nStorageMeta\n)\x81}b}b.",
    "a class is called": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)R.",
    "an extension": b"\x80\x02\x82\x01.",
    "the old way of making instances": b"(cos\nsystem\nX\1\0\0\0ao.",
    "a place in the memo that would take 32 GB": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a text that claims 8 EB": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",
    "a frame that claims 8 EB": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "a key without end": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "a memory format without end": (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n)"
        + b"\x85" * 200_000
        + b"\x85R."
    ),
    "an empty stack": b"\x80\x02.",
    "a protocol of the future": b"\x80\x7fN.",
    "nothing": b"",
}


@pytest.mark.parametrize("data", HAND_MADE.values(), ids=HAND_MADE)
def test_what_no_pickler_makes_is_refused(data: bytes) -> None:
    before = {kind: dict(vars(kind)) for kind in (stock.Metadata, stock.StorageMeta)}
    with pytest.raises(MetadataDecodeError, match=r"\Am: "):
        read_metadata(data, name="m")
    assert before == {kind: dict(vars(kind)) for kind in before}


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "a path out of the folder": (lambda m: set_storage(m, relative_path="../other"), "relative_path"),
    "a negative offset": (lambda m: set_storage(m, offset=-1), "offset"),
    "a length of text": (lambda m: set_storage(m, length="7"), "length"),
    "no entries": (lambda m: vars(m).pop("state_dict_metadata"), "state_dict_metadata"),
}
CONTRADICTIONS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a gap": (lambda m: m.state_dict_metadata["w"].chunks.pop(), r"w: .*6 of 12"),
    "a chunk that lies nowhere": (
        lambda m: m.storage_data.pop(stock.MetadataIndex("w", (2, 0))),
        r"it doesn't locate w at \(2, 0\)",
    ),
    "a value that lies nowhere": (
        lambda m: m.storage_data.pop(stock.MetadataIndex("step")),
        "it doesn't locate step",
    ),
}


def set_storage(metadata: stock.Metadata, **fields: object) -> None:
    vars(metadata.storage_data[stock.MetadataIndex("step")]).update(fields)


@pytest.mark.parametrize("name", WRONG | CONTRADICTIONS)
def test_wrong_fields_and_contradictions_are_refused(name: str) -> None:
    change, message = (WRONG | CONTRADICTIONS)[name]
    metadata = sample()
    change(metadata)

    def read() -> None:
        found = read_metadata(pickle.dumps(metadata), name="m")
        assert name in CONTRADICTIONS, "it was read"
        check_metadata(found, name="m")

    with pytest.raises(MetadataDecodeError, match=f"m: .*{message}"):
        read()


@pytest.mark.parametrize("reader", [SafeFileSystemReader, SafeFsspecReader])
def test_readers_load_what_stock_saved_and_run_nothing(
    reader: type[SafeFileSystemReader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    save({"w": torch.arange(6.0), "step": 3}, storage_writer=FileSystemWriter(folder), no_dist=True)
    state = {"w": torch.zeros(6), "step": 0}
    load(state, storage_reader=reader(str(folder)), no_dist=True)
    assert torch.equal(state["w"], torch.arange(6.0))  # type: ignore[arg-type]  # a tree of unlike values
    assert state["step"] == 3
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(HOSTILE["a command"]))
    with pytest.raises(MetadataDecodeError, match=r"checkpoint/\.metadata: .*posix\.system"):
        reader(str(folder)).read_metadata()
    assert not (tmp_path / "ran").exists()
