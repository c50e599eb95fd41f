"""Any plain value, restored into a state that began with any other: it comes back, or the restore is refused."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from stepkeeper_planners.errors import DuplicateNameError, LoadMismatchError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.load_request import LoadTarget, build_load_request
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.stored_state import StoredState
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.tree import flatten_state

ALONE = Ranks(rank=0, world_size=1)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(0, 3), st.floats(allow_nan=False), st.text("ab", max_size=2)
)
KEYS = st.one_of(
    st.text("ab1", min_size=1, max_size=2),
    st.none(),
    st.booleans(),
    st.integers(-1, 2),
    st.floats(allow_nan=False),
    st.tuples(SCALARS, st.integers()),
)


def nested(keys: st.SearchStrategy[Any], least: int) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(SCALARS, st.tuples(SCALARS)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(keys, inner, min_size=least, max_size=3)
        ),
        max_leaves=6,
    )


SAVED = nested(KEYS, 0)
# An empty dict of the start stays where nothing was saved in its place.
STARTS: st.SearchStrategy[Any] = st.one_of(
    nested(st.sampled_from(["a", "b", "1"]), 1), st.just({}), st.just([{}])
)


def restore(start: object, saved: object) -> tuple[object, bool]:
    """Return what a restore makes of `start`, and whether it refuses."""
    stored, state = {"n": 1, "v": saved}, {"n": 0, "v": copy.deepcopy(start)}
    flat, target = flatten_state(stored), LoadTarget(state)
    wanted = target.flat
    paths = flat.paths | encode_nesting(flat.tree, flat.paths)
    reads, differences = compare(
        build_load_request(target, ALONE),
        StoredState(tensors={}, values=tuple(flat.values), read_paths=lambda: paths),
        ALONE,
    )
    if differences:
        return None, True
    try:
        values = {each.fqn: each.build_value(flat.values, None, ALONE) for each in reads.values}
    except LoadMismatchError:
        return None, True
    finish_load(state, wanted, values)
    return state["v"], False


@settings(deadline=None, max_examples=scaled(400))
@given(STARTS, SAVED)
def test_a_plain_value_comes_back_or_the_restore_is_refused(start: object, saved: object) -> None:
    try:
        restored, refused = restore(start, saved)
    except DuplicateNameError:
        return
    assert refused or leaves(restored) == leaves(saved)


@settings(deadline=None)
@given(st.sampled_from([None, 0, "", {}]), SAVED)
def test_any_value_comes_back_where_nothing_or_a_scalar_was(start: object, saved: object) -> None:
    try:
        restored, refused = restore(start, saved)
    except DuplicateNameError:
        return
    assert not refused
    assert repr_sorted(restored) == repr_sorted(saved)


def leaves(value: object) -> dict[str, str]:
    return {name: repr(leaf) for name, leaf in flatten_state({"v": value}).values.items()}


def repr_sorted(value: Any) -> Any:
    """Describe a value with the types of all keys and items, whatever the order of its dicts."""
    if isinstance(value, dict):
        return {"dict": sorted((repr(key), repr(repr_sorted(item))) for key, item in value.items())}
    if isinstance(value, list):
        return [repr_sorted(item) for item in value]
    return repr(value)


@pytest.mark.parametrize(
    ("start", "saved"),
    [
        ([{"a": 1}], [{"a": 1}, {}]),
        ([{"a": 1}], [{"a": 1}, {"b": {}}]),
        ([{"a": 1}], [{}, {}]),
        ({}, {"eval": {}}),
        ({}, [{}]),
        ([], [{}]),
        ([], [{0.5: 1, (1, 2): 2}]),
        ({}, {None: 1, True: 2, 0.5: 3, float("inf"): {}}),
        (None, {"a": {"b": 1}}),
        (None, {}),
        (None, [{"a": 1}, {}]),
        ({frozenset({1}): 1}, {frozenset({1}): 2}),
    ],
)
def test_what_leaves_no_entry_comes_back(start: object, saved: object) -> None:
    assert restore(start, saved) == (saved, False)


def test_keys_of_other_classes_are_refused() -> None:
    assert restore({}, {frozenset({1}): 2}) == (None, True)
