"""torch.save files as they may come from anywhere: what they claim is checked before anything relies on it."""

import resource
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from planners_parts.pickles import Reduced

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.formats import checkpoint_to_torch_save, torch_save_to_checkpoint


class Stranger:
    """A class that nobody knows."""


def test_numpy_data_that_claims_more_bytes_than_it_has_is_refused(tmp_path: Path) -> None:
    """numpy believes a dtype's state: one of 4 bytes with a field of a billion is read out of bounds."""
    field = {"a": (np.dtype("S1000000000"), 0)}
    dtype = Reduced(np.dtype, ("V4", False, True), (3, "|", None, ("a",), field, 4, 1, 0))
    make = np.zeros(0).__reduce__()[0]
    array = Reduced(make, (np.ndarray, (0,), b"b"), (1, (2, 2), dtype, True, b"AAAA" * 4))
    torch.save({"v": array}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match="damaged"):
        torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "checkpoint")


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
DTYPE: Final = NEW_DTYPE + b"(K\3" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
STORAGE: Final = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\0tQ"
CONTENT: Final = text("a" * 10_000)
ARRAY: Final = (
    b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85"
    + text("b")
    + b"\x87R(K\1M\x10\x27\x85h\0\x89h\1tb"
)
HAND_MADE = {
    "a mark without end": (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + STORAGE
        + b"K\0K\0\x85K\1\x85\x89}}"
        + text("conj")
        + ENDLESS
        + b"stR.",
        "beside its elements",
    ),
    "a name of a field without end": (
        NEW_DTYPE + b"(K\3" + text("<") + b"N" + ENDLESS + b"\x85}K\4K\4K\0tb.",
        "fields of a numpy dtype",
    ),
    "a use of a dtype before its state": (b"]" + NEW_DTYPE + b"q\0ah\0}b0.", "before its state"),
    "many arrays of one content": (
        DTYPE
        + b"q\x000c_codecs\nencode\n"
        + CONTENT
        + text("latin1")
        + b"\x86Rq\x010]("
        + ARRAY * 200
        + b"e.",
        "far more",
    ),
    "many bytes of one text": (
        b"c_codecs\nencode\nq\0" + CONTENT + text("latin1") + b"\x86q\1R0](" + b"h\0h\1R" * 200 + b"e.",
        "far more",
    ),
}


@pytest.mark.parametrize(("data_pickle", "message"), HAND_MADE.values(), ids=HAND_MADE)
def test_what_no_pickler_makes_is_refused(tmp_path: Path, data_pickle: bytes, message: str) -> None:
    path = written(tmp_path / "a.pt", b"\x80\x02" + data_pickle)
    with pytest.raises(SourceError, match=message):
        torch_save_to_checkpoint(path, tmp_path / "checkpoint")


def test_where_a_stranger_is_is_found_in_lists_that_hold_lists_twice(tmp_path: Path) -> None:
    shared: list[Any] = [1]
    for _ in range(60):
        shared = [shared, shared]
    torch.save({"v": shared, "bad": Stranger()}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=r"at bad: .*Stranger"):
        torch_save_to_checkpoint(tmp_path / "a.pt", tmp_path / "checkpoint")


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
