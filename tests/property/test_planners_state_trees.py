"""Any tree of state: named as torch.distributed.checkpoint names it, and back where it was after a load."""

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from stepkeeper_planners.errors import DuplicateNameError
from stepkeeper_planners.saving.fingerprints import digest_value
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.structure import StructureCache
from stepkeeper_planners.state.tree import flatten_state
from stepkeeper_planners.state.values import decode_value, encode_value

KEYS = st.one_of(st.text(alphabet="ab.0@/", max_size=3), st.integers(0, 2), st.none(), st.booleans())
NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)
)
PLAIN = st.one_of(NUMBERS, st.text(max_size=3), st.binary(max_size=3))
TUPLES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=5,
).map(lambda value: (value,))
TENSORS = st.lists(st.integers(0, 100), max_size=3).map(torch.tensor)
ARRAYS = st.lists(st.integers(0, 100), max_size=3).map(np.array)
LEAVES = st.one_of(PLAIN, TUPLES, TENSORS, ARRAYS)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(mappings, mappings.map(OrderedDict), st.lists(inner, max_size=3))


TREES = st.dictionaries(KEYS, st.recursive(LEAVES, containers, max_leaves=12), max_size=4)


class Part:
    """An object whose state is a tree."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def state_dict(self) -> Any:
        return self.tree

    def load_state_dict(self, state: Any) -> None:
        self.tree = state


# torch's and numpy's first use counts as the first tree's.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_names_and_leaves_are_those_of_stock(tree: dict[Any, Any]) -> None:
    try:
        leaves, paths = flatten_state_dict(tree)
    except ValueError:
        try:
            flatten_state(tree)
        except DuplicateNameError:
            return
        raise
    flat = flatten_state(tree)
    ours = {**flat.tensors, **flat.values, **{name: flat.tensors[of] for name, of in flat.aliases.items()}}
    assert ours.keys() == leaves.keys()
    assert all(ours[name] is leaf or isinstance(leaf, list) for name, leaf in leaves.items())
    assert [*flat.paths.items()] == [*paths.items()]


@settings(deadline=None)
@given(st.lists(TREES, min_size=2, max_size=3))
def test_what_was_gathered_before_makes_no_difference(trees: list[dict[Any, Any]]) -> None:
    cache = StructureCache(lambda flat, _value_bytes: flat.paths)
    for tree in (*trees, *map(other, reversed(trees)), *trees):
        try:
            fresh = flatten_state(tree)
        except DuplicateNameError:
            continue
        found = cache.look_up(tree)
        again = found.flat
        assert found.derived == fresh.paths
        assert (again.paths, again.aliases) == (fresh.paths, fresh.aliases)
        assert (again.values.keys(), [*again.tensors]) == (fresh.values.keys(), [*fresh.tensors])
        assert all(again.tensors[name] is fresh.tensors[name] for name in fresh.tensors)
        assert all(
            again.values[name] is leaf or isinstance(leaf, list) for name, leaf in fresh.values.items()
        )


def other(node: Any) -> Any:
    """The same tree with other leaves."""
    if isinstance(node, dict):
        return type(node)((key, other(part)) for key, part in node.items())
    if isinstance(node, list) and any(isinstance(part, dict | list | torch.Tensor) for part in node):
        return [other(part) for part in node]
    if isinstance(node, torch.Tensor):
        return torch.full_like(node, -1)
    return "other"


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return [*one] == [*two] and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and bool(np.array_equal(one, two))
    return bool(one == two)


@given(TREES, TREES)
@example({"0": {}, 0: None}, {})
@example({".": None, "": {"": {}}}, {})
def test_what_was_saved_is_loaded(tree: dict[Any, Any], own: dict[Any, Any]) -> None:
    saved: dict[str, Any] = {
        "plain": tree,
        "object": Part(tree),
        "own": PerRank(own),
        "mine": PerRank(Part(own)),
    }
    try:
        flat = flatten_state(saved)
        encode_nesting(flat.tree, flat.paths)  # as each save and each load does: it refuses keys of one text
    except DuplicateNameError:
        return
    values = {
        fqn: decode_value(fqn, encode_value(fqn, value))
        for fqn, value in (flat.values | flat.per_rank).items()
    }
    loaded: dict[str, Any] = {
        "plain": other(tree),
        "object": Part(other(tree)),
        "own": PerRank(None),
        "mine": PerRank(Part(None)),
    }
    wanted = flatten_state(loaded)
    assert wanted.values.keys() == flat.values.keys()
    assert wanted.tensors.keys() | wanted.aliases.keys() == flat.tensors.keys() | flat.aliases.keys()
    for name, tensor in wanted.tensors.items():
        tensor.copy_(flat.tensors[flat.aliases.get(name, name)])
    finish_load(loaded, wanted, values)
    assert same(loaded["plain"], tree)
    assert same(loaded["object"].tree, tree)
    assert same(loaded["own"].value, own)
    assert same(loaded["mine"].value.tree, own)


NAMES = st.sampled_from("abcdef")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, 0.5]),
    st.text(max_size=2),
    st.binary(max_size=2),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=6,
)


def kinds(value: object) -> object:
    """The value with its types: Python finds True, 1 and 1.0 equal, and 0.0 and -0.0."""
    if isinstance(value, dict):
        return ("dict", frozenset((kinds(key), kinds(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(map(kinds, value)))
    return (type(value).__name__, repr(value))


@given(VALUES, VALUES)
def test_values_have_one_digest_exactly_if_they_are_equal(one: object, other: object) -> None:
    assert (digest_value("v", one) == digest_value("v", other)) == (kinds(one) == kinds(other))
    if isinstance(one, dict):
        assert digest_value("v", dict(reversed(one.items()))) == digest_value("v", one)
