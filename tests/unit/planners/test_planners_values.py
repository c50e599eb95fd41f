"""Values as bytes and back; nothing else than the list goes in, nothing else comes out."""

import datetime as dt
import enum
import random
import re
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from planners_parts.stock import quantized_tensor

from stepkeeper_planners.dtypes import all_dtypes
from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.state.values import decode_value, encode_value

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 — a tuple subclass as users make them


class Colour(enum.IntEnum):
    RED = 1


VALUES: list[object] = [
    None,
    True,
    2**200,
    -(2**20_000),
    -0.5,
    float("inf"),
    1 + 2j,
    "wört \ud800 \x00",
    "",
    b"\x00\xff",
    b"",
    [1, [2.0, "x"]],
    [],
    (0.9, 0.999),
    (),
    {"a": 1, 2: ("b", None), (1, "x"): [], None: 0, True: 1, 1.5: 2, b"k": 3},
    OrderedDict(x=1),
    Counter({30: 1, 80: 1}),
    torch.float16,
    torch.device("cpu"),
    torch.device("xla", 0),
    torch.Size([2, 3]),
    torch.Size([]),
    random.Random(3).getstate(),
    np.random.default_rng(1).bit_generator.state,
    "MT19937",
    np.float32(1.5),
    np.float16(2),
    np.longdouble(1) / 3,
    np.int64(-7),
    np.bool_(True),
    np.str_("text"),
    np.str_(""),
    np.bytes_(b"ab"),
    np.complex64(1j),
    np.datetime64("2020-01-01T00:00", ("s", 25)),
    np.datetime64("nat"),
    np.timedelta64(5, "us"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_value_comes_back_of_its_own_type(value: object) -> None:
    back = decode_value("k", encode_value("k", value))
    assert type(back) is type(value)
    assert back == value or str(back) == str(value) == "NaT"
    if isinstance(value, np.generic):
        assert isinstance(back, np.generic)
        assert back.dtype == value.dtype


DTYPES: list[Any] = ["f4", "f8", "f2", "g", "i1", "u8", "c8", "?", "S3", "U4", ">f8", ">i2", "V3"]


DTYPES += ["M8[s]", "M8[25us]", "m8[ms]", "m8"]


STRUCTURES = [
    [("a", "i4"), ("b", "f8")],
    [("a", "i4"), ("b", ">f8", (2, 3)), ("c", [("d", "U2")])],
    {"names": ["x", "y"], "formats": ["i4", "i2"], "offsets": [8, 2], "itemsize": 16},
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
]


@pytest.mark.parametrize("dtype", [*DTYPES, *STRUCTURES], ids=str)
def test_a_numpy_array_comes_back(dtype: Any) -> None:
    random_bytes = np.frombuffer(np.random.default_rng(0).bytes(6 * np.dtype(dtype).itemsize), dtype)
    full = np.zeros(6, dtype) if np.dtype(dtype).char == "U" or np.dtype(dtype).fields else random_bytes
    for array in (
        full.reshape(2, 3),
        full.reshape(3, 2).T,
        full.reshape(6)[::2],
        full[0:1].reshape(()),
        np.zeros((0,), dtype=dtype),
        np.zeros((2, 0, 3), dtype=dtype),
    ):
        back = decode_value("k", encode_value("k", array))
        assert isinstance(back, np.ndarray)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.flags.writeable
        if np.dtype(dtype).fields is None:
            assert back.tobytes() == array.tobytes()
        assert np.array_equal(back, array) or array.dtype.kind in "fcMmV"


QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
UNSTORED = {dtype for name, dtype in all_dtypes().items() if re.fullmatch("u?int[1-7]", name)}


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtype", sorted({*all_dtypes().values()} - QUANTIZED - UNSTORED, key=str), ids=str)
def test_a_tuple_may_hold_cpu_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    data = torch.arange(64, dtype=torch.uint8)
    whole = data.view(dtype)
    parts = [] if dtype is torch.float4_e2m1fn_x2 else [whole[::2], whole.view(2, -1).t()]
    for tensor in (whole, whole[1:2].reshape(()), whole[:0], *parts):
        back: Any = decode_value("k", encode_value("k", (tensor, 1)))
        assert back[0].dtype == dtype
        assert back[0].shape == tensor.shape
        assert _bytes_of(back[0]) == _bytes_of(tensor.contiguous())
        assert back[1] == 1


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_of_a_tensor_only_its_elements_are_stored() -> None:
    large = torch.zeros(100_000)
    assert len(encode_value("k", (large[3:5],))) < 5_000
    parameter = torch.nn.Parameter(torch.arange(3.0))
    tagged = torch.arange(2.0)
    tagged.note = object()  # type: ignore[attr-defined]  # what users do
    turned = torch.complex(torch.arange(2.0), torch.ones(2)).conj()
    expanded = torch.ones(1).expand(5)
    back: Any = decode_value("k", encode_value("k", (parameter, tagged, turned, expanded, parameter * 2)))
    assert [type(tensor) for tensor in back] == [torch.Tensor] * 5
    assert not any(tensor.requires_grad for tensor in back)
    assert torch.equal(back[0], torch.arange(3.0))
    assert torch.equal(back[2], turned)
    assert torch.equal(back[3], torch.ones(5))


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_deep_values_come_back_and_endless_ones_are_refused() -> None:
    assert decode_value("k", encode_value("k", nested(100))) == nested(100)
    endless: list[object] = []
    endless.append((endless,))
    for value in (nested(102), (endless,), nested(100_000)):
        with pytest.raises(UnsupportedValueError, match=r"a\.k: nested more than 100 deep"):
            encode_value("a.k", value)


REFUSED: dict[str, object] = {
    "an array of nothing": np.zeros(3, "V0"),
    "a set": {1, 2},
    "a datetime": dt.datetime(2020, 1, 1),  # noqa: DTZ001 — any object outside of the list
    "a named tuple": Pair(1, 2),
    "an enum that is a number": Colour.RED,
    "a defaultdict": defaultdict(int),
    "a generator": random.Random(1),
    "an array of objects": np.array([object()]),
    "an array with objects in a field": np.zeros(1, [("a", "O")]),
    "an array with metadata": np.zeros(1, np.dtype("f4", metadata={"unit": "m"})),
    "an array with metadata in a field": np.zeros(
        1, [("a", [("b", np.dtype("f4", metadata={"unit": "m"}), 2)])]
    ),
    "something deep": (1, [{"deep": {3}}]),
    "a key that is a class": {int: 1},
    "a meta tensor": (torch.ones(1, device="meta"),),
    "a sparse tensor": (torch.ones(2).to_sparse(),),
    "a quantized tensor": (quantized_tensor(),),
    "a tensor of bits": (torch.zeros(2, dtype=torch.uint8).view(all_dtypes()["uint4"]),),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedValueError, match=r"trainer\.thing"):
        encode_value("trainer.thing", value)
