"""Bytes with changes anywhere, some of them by words that the reader knows."""

from collections.abc import Sequence

from hypothesis import strategies as st

__all__ = ["Changes", "changed", "changes"]

Changes = list[tuple[int, int, bytes]]
"""Each at a place, of so many bytes, into others."""


def changes(words: Sequence[bytes]) -> st.SearchStrategy[Changes]:
    """A few, into any bytes or one of the words."""
    instead = st.one_of(st.binary(max_size=4), st.sampled_from(words))
    return st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4), instead), min_size=1, max_size=4)


def changed(data: bytes, changes: Changes) -> bytes:
    """Some bytes taken out at each place, others put in."""
    for place, n_bytes, instead in changes:
        at = place % (len(data) + 1)
        data = data[:at] + instead + data[at + n_bytes :]
    return data
