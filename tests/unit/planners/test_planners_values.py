"""Values as bytes and back; nothing else than the list goes in, nothing else comes out."""

import datetime as dt
import io
import os
import pickle
import random
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from stepkeeper_planners.errors import UnsupportedValueError, ValueDecodeError
from stepkeeper_planners.values import decode_value, encode_value

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 — a tuple subclass as users make them

VALUES: list[object] = [
    None,
    True,
    2**200,
    -0.5,
    float("inf"),
    1 + 2j,
    "wört",
    b"\x00\xff",
    [1, [2.0, "x"]],
    (0.9, 0.999),
    {"a": 1, 2: ("b", None)},
    OrderedDict(x=1),
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    random.Random(3).getstate(),
    "MT19937",
    np.float32(1.5),
    np.int64(-7),
    np.bool_(True),
    np.str_("text"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_a_value_comes_back_of_its_own_type(value: object) -> None:
    back = decode_value("k", encode_value("k", value))
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize(
    "dtype",
    ["f4", "f8", "f2", "i1", "u8", "c8", "?", "S3", "U4", "M8[s]", "m8[ms]", [("a", "i4"), ("b", "f8")]],
)
def test_a_numpy_array_comes_back(dtype: Any) -> None:
    for array in (
        np.zeros((2, 3), dtype=dtype),
        np.zeros((0,), dtype=dtype),
        np.zeros((3, 2), dtype=dtype).T,
    ):
        back = decode_value("k", encode_value("k", array))
        assert isinstance(back, np.ndarray)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


def test_the_legacy_numpy_state_comes_back() -> None:
    state = np.random.RandomState(5).get_state()
    back: Any = decode_value("k", encode_value("k", state))
    other = np.random.RandomState(0)
    other.set_state(back)
    assert other.rand() == np.random.RandomState(5).rand()


def test_a_tuple_may_hold_cpu_tensors() -> None:
    back: Any = decode_value("k", encode_value("k", (torch.ones(2), 1)))
    assert torch.equal(back[0], torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        dt.datetime(2020, 1, 1),  # noqa: DTZ001 — any object outside of the list
        Pair(1, 2),
        lambda: 1,
        random.Random(1),
        np.random.default_rng(1),
        np.array([object()]),
        int,
        (1, [{"deep": {3}}]),
        (torch.ones(1, device="meta"),),
    ],
    ids=lambda v: type(v).__name__,
)
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedValueError, match=r"trainer\.thing"):
        encode_value("trainer.thing", value)


class Boom:
    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("hostile",)


def test_hostile_bytes_run_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save(Boom(), buffer)
    for data in (
        buffer.getvalue(),
        pickle.dumps(Boom(), protocol=2),
        b"",
        b"not a checkpoint",
        encode_value("k", [1] * 50)[:-30],
    ):
        with pytest.raises(ValueDecodeError, match=r"rng\.python"):
            decode_value("rng.python", data)
    assert not list(tmp_path.iterdir())
