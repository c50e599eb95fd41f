"""Test that what a state holds several times is written several times, and refused where that has no end."""

import io
from typing import Any

import pytest
import torch

from stepkeeper_planners.errors import UnsupportedValueError, ValueDecodeError
from stepkeeper_planners.state.tree import flatten_state
from stepkeeper_planners.state.values import decode_value, encode_value


def held_twice(depth: int, kind: type = list, core: Any = 1) -> Any:
    node = kind([core])
    for _ in range(depth):
        node = kind([node, node])
    return node


@pytest.mark.parametrize("depth", [40, 90])
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_that_hold_one_list_twice_are_refused_at_once(depth: int, kind: type) -> None:
    node = held_twice(depth, kind)
    with pytest.raises(UnsupportedValueError, match="again and again"):
        encode_value("v", node)
    with pytest.raises(UnsupportedValueError, match=r"v\..* again and again"):
        flatten_state({"v": node})
    stored = io.BytesIO()
    torch.save(node, stored)
    with pytest.raises(ValueDecodeError, match="again and again"):
        decode_value("v", stored.getvalue())


def test_large_things_held_often_are_refused() -> None:
    for large in (torch.zeros(1 << 20), b"x" * (4 << 20)):
        with pytest.raises(UnsupportedValueError, match="again and again"):
            encode_value("v", [large] * 100)


def test_what_is_held_a_few_times_is_stored() -> None:
    value = {"a": held_twice(8), "b": ("train",) * 1000, "c": [(1, 2)] * 1000}
    assert decode_value("v", encode_value("v", value)) == value
    long = list(range(100_000))
    assert len(flatten_state({"v": value, "w": [long, long]}).values) > 3
    assert flatten_state({"v": value}).values["v.a"] == value["a"]
