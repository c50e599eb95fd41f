"""Bytes that stand where a value should, or a torch.save file: nothing is run, and little memory is taken."""

import io
import os
import pickle
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from planners_parts.pickles import Reduced
from planners_parts.stock import quantized_tensor

from stepkeeper_planners.errors import SourceError, ValueDecodeError
from stepkeeper_planners.formats import checkpoint_to_torch_save, torch_save_to_checkpoint
from stepkeeper_planners.state.values import decode_value


class Mine:
    """A class that the process has declared safe for torch.load."""

    def __setstate__(self, state: object) -> None:
        Path("ran").mkdir()


RUN = Reduced(os.mkdir, ("ran",))
ARRAY = np.zeros(0).__reduce__()[0]
EMPTY = (np.ndarray, (0,), b"b")
FLOAT = np.dtype("f8")

HOSTILE: dict[str, Any] = {
    "as an argument": Reduced(torch.Size, (RUN,)),
    "an array of a negative shape": Reduced(ARRAY, EMPTY, (1, (-1,), FLOAT, False, b"\0" * 8)),
    "an array of many items without bytes": Reduced(
        ARRAY, EMPTY, (1, (1 << 40,), np.dtype("V0"), False, b"")
    ),
    "a dtype from a dict": Reduced(np.dtype, ({"names": ["a"], "formats": ["O"]}, False, True)),
    "a scalar longer than its bytes": Reduced(np.float64(0).__reduce__()[0], (FLOAT, b"\0")),
    "a command": Reduced(os.system, ("mkdir ran",)),
    "torch's rebuilding of types": Reduced(
        torch._tensor._rebuild_from_type_v2, (os.mkdir, torch.Tensor, ("ran",), {})
    ),
    "torch's rebuilding of subclasses": Reduced(
        torch._utils._rebuild_wrapper_subclass,
        (Mine, torch.float32, (1,), (1,), 0, torch.strided, "cpu", False),
    ),
    "a sparse tensor": (torch.ones(2).to_sparse(),),
    "a quantized tensor": (quantized_tensor(),),
    "as a key": {RUN: 1},
    "a number as a key that is too long to be printed": {10**5000: 1},
    "as a state": Reduced(ARRAY, EMPTY, RUN),
    "an array of objects": np.array([RUN], dtype=object),
    "an array longer than its bytes": Reduced(ARRAY, EMPTY, (1, (1 << 40,), FLOAT, False, b"\0" * 8)),
    "an array of another class": Reduced(ARRAY, (np.matrix, (0,), b"b")),
    "a dtype of objects": Reduced(np.dtype, ("O", False, True), (3, "|", None, None, None, -1, -1, 63)),
    "a dtype without a state": Reduced(np.dtype, ("f8", False, True)),
    "a dtype whose field lies outside": Reduced(
        np.dtype,
        ("V4", False, True),
        (3, "|", None, ("a",), {"a": (FLOAT, 1 << 20)}, 4, 1, 16),
    ),
    "bytes of a length": Reduced(bytes, (1 << 40,)),
    "an encoding": Reduced(__import__("_codecs").encode, ("x", "rot13")),
    "a device of a class": Reduced(torch.device, (RUN,)),
}


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def nothing_ran(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(folder)
    yield
    assert not list(folder.iterdir())


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_what_a_pickle_may_say_is_refused(value: object) -> None:
    with pytest.raises(ValueDecodeError, match=r"rng\.python"):
        decode_value("rng.python", saved(value))


def test_what_others_declared_safe_is_not_safe_here() -> None:
    with torch.serialization.safe_globals([Mine, os.mkdir]):
        for value, name in ((Mine(), "Mine"), (RUN, "posix.mkdir")):
            with pytest.raises(ValueDecodeError, match=f"k: .*{name}") as raised:
                decode_value("k", saved(value))
            assert "weights_only" not in str(raised.value), "nobody is told to read it unchecked"


def changed(value: object, record: str, change: Any, **how: Any) -> bytes:
    source = zipfile.ZipFile(io.BytesIO(saved(value)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as target:
        for entry in source.infolist():
            content = source.read(entry)
            name = entry.filename
            target.writestr(name, change(content) if name.endswith(record) else content)
    return buffer.getvalue()


def storage_pickle(place: bytes, length: bytes = b"K\x02") -> bytes:
    """A tensor of two stored floats, with the given opcodes for offset, sizes and strides."""
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu"
        + length
        + b"tQ"
        + place
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )


BIG = b"\x8a\x06\0\0\0\0\0\x01"  # 2**40

TWO, ONE = b"K\0K\x02\x85K\x01\x85", b"K\0K\x01\x85K\x01\x85"
TENSORS = {
    "of unlike sizes and strides": storage_pickle(b"K\0K\x02\x85)"),
    "longer than its storage": storage_pickle(b"K\0K\x03\x85K\x01\x85"),
    "repeating one element": storage_pickle(b"K\0" + BIG + b"\x85K\0\x85"),
    "starting behind its storage": storage_pickle(b"K\x02K\x01\x85K\x01\x85"),
    "with strides that lead out": storage_pickle(b"K\0K\x02\x85K\x02\x85"),
    "of a negative size": storage_pickle(b"K\0J\xff\xff\xff\xff\x85K\x01\x85"),
    **{
        f"in a storage of the length {length!r}": storage_pickle(ONE, length)
        for length in (b"K\x03", b"K\x01", BIG, b"N", b"J\xff\xff\xff\xff")
    },
}


@pytest.mark.parametrize("pickled", TENSORS.values(), ids=TENSORS)
def test_a_tensor_outside_of_its_storage_is_refused(pickled: bytes) -> None:
    right = changed((torch.ones(2),), "data.pkl", lambda _: storage_pickle(TWO))
    assert torch.equal(decode_value("k", right), torch.ones(2))  # type: ignore[arg-type]  # a tensor
    with pytest.raises(ValueDecodeError, match="k: "):
        decode_value("k", changed((torch.ones(2),), "data.pkl", lambda _: pickled))


def test_zip_tricks_are_refused() -> None:
    value = (torch.zeros(1000), 1)
    tricks = {
        "records is compressed": changed(1, "nothing", bytes, compression=zipfile.ZIP_DEFLATED),
        "compressed or encrypted": encrypted(saved(value)),
        "larger than the file": overlapping(),
        "isn't little-endian": changed(value, "byteorder", lambda _: b"big"),
        "has the wrong size": changed(value, "data/0", lambda content: content[:-4]),
        "it isn't an archive": saved(value)[:-1],
        "can't be read": saved(value)[100:],
        "it has no data": b"x" * 10 + b"PK\5\6" + b"\0" * 18,
    }
    for reason, data in tricks.items():
        with pytest.raises(ValueDecodeError, match=f"k: .*{reason}"):
            decode_value("k", data)


def overlapping() -> bytes:
    """Hundreds of records that are one and the same megabyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        target.writestr("a/data.pkl", pickle.dumps(1, 2))
        target.writestr("a/data/0", b"\0" * (1 << 20))
        (entry,) = [e for e in target.infolist() if e.filename == "a/data/0"]
        for number in range(1, 300):
            twin = zipfile.ZipInfo(f"a/data/{number}")
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(twin, name, getattr(entry, name))
            target.filelist.append(twin)
    return buffer.getvalue()


def encrypted(data: bytes) -> bytes:
    start = data.index(b"PK\1\2")
    return data[: start + 8] + struct.pack("<H", 1) + data[start + 10 :]


def test_what_is_nested_without_end_is_refused() -> None:
    for depth in (200, 100_000):
        stacked = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
        data = changed(1, "data.pkl", lambda _, stacked=stacked: stacked)
        with pytest.raises(ValueDecodeError, match="nested more than 100 deep"):
            decode_value("k", data)


def written(path: Path, data_pickle: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data_pickle)
        archive.writestr("archive/data/0", b"")
    return path


def test_the_index_of_a_memo_allocates_nothing(tmp_path: Path) -> None:
    """C's unpickler makes its memo as long as the largest index, 16 bytes each."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hostile = b"\x80\x02]r" + (100_000_000).to_bytes(4, "little") + b"cdatetime\ndate\nq\x01\x86."
    with pytest.raises(SourceError, match=r"names datetime\.date, .*; at 1: datetime\.date"):
        torch_save_to_checkpoint(written(tmp_path / "a.pt", hostile), tmp_path / "checkpoint")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


ENDLESS: Final = b")" + b"\x85" * 200_000
NEW_DTYPE: Final = b"cnumpy\ndtype\n" + text("u1") + b"\x89\x88\x87R"
STORAGE: Final = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\0tQ"

HAND_MADE = {
    "a mark without end": (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + STORAGE
        + b"K\0K\0\x85K\1\x85\x89}}"
        + text("conj")
        + ENDLESS
        + b"stR.",
        "more than its elements",
    ),
    "a name of a field without end": (
        NEW_DTYPE + b"(K\3" + text("<") + b"N" + ENDLESS + b"\x85}K\4K\4K\0tb.",
        "fields of a numpy dtype",
    ),
    "a use of a dtype before its state": (b"]" + NEW_DTYPE + b"q\0ah\0}b0.", "before its state"),
}


@pytest.mark.parametrize(("data_pickle", "message"), HAND_MADE.values(), ids=HAND_MADE)
def test_what_no_pickler_makes_is_refused(tmp_path: Path, data_pickle: bytes, message: str) -> None:
    path = written(tmp_path / "a.pt", b"\x80\x02" + data_pickle)
    with pytest.raises(SourceError, match=message):
        torch_save_to_checkpoint(path, tmp_path / "checkpoint")


def test_what_models_have_beside_their_elements_is_no_obstacle(tmp_path: Path) -> None:
    """Versions of modules on the dict, attributes on a tensor, a tensor of an accelerator."""
    state = torch.nn.BatchNorm1d(3).state_dict()
    weight = torch.nn.Parameter(torch.arange(3.0))
    weight.tag = "mine"  # type: ignore[attr-defined]  # any name
    device = Reduced(
        torch._utils._rebuild_device_tensor_from_cpu_tensor,
        (torch.ones(2), torch.float32, "xla:0", False),
    )
    negated = torch.tensor([1 + 2j]).conj().imag
    torch.save({"m": state, "w": weight, "d": device, "n": negated}, tmp_path / "a.pt")
    torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "checkpoint")
    checkpoint_to_torch_save(tmp_path / "checkpoint", tmp_path / "b.pt")
    after = torch.load(tmp_path / "b.pt")
    assert list(after["m"]) == list(state)
    assert torch.equal(after["m"]["running_var"], torch.ones(3))
    assert torch.equal(after["w"], torch.arange(3.0))
    assert torch.equal(after["d"], torch.ones(2))
    assert torch.equal(after["n"], torch.tensor([-2.0]))
