"""Fingerprints are equal exactly where what is to be saved is."""

from hypothesis import given
from hypothesis import strategies as st

from stepkeeper_planners.saving.fingerprints import digest_value

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
