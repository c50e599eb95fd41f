"""Test that a structure is sent once, and that nothing is ever written by another save's structure."""

import secrets
from dataclasses import replace
from typing import Any

import pytest

from stepkeeper.checkpoint import SaveOrder, Structure, TensorOrder
from stepkeeper.companion.messages import (
    OpenRequest,
    WriteRequest,
)
from stepkeeper.companion.session import Session
from stepkeeper.errors import CompanionError

ROWS = (
    TensorOrder(fqn='w\n"ü', dtype="float32", global_shape=(4, 8), offsets=(2, 0), sizes=(2, 8), start=0),
    TensorOrder(fqn="s", dtype="int64", global_shape=(), offsets=(), sizes=(), start=64),
)
STRUCTURE = Structure.build(ROWS, aliases={"v": "s"}, key_paths={"s": ("a", 0, "s")})
REQUEST = WriteRequest(
    step=1, claim=0, nonce="0", values=(), structure_key=STRUCTURE.key, structure=STRUCTURE.text
)


def session_of(rank: int = 1, world_size: int = 2, **opening: Any) -> Session:
    opening = {"uri": f"memory://{secrets.token_hex(4)}"} | opening
    return Session(OpenRequest(rank=rank, world_size=world_size, **opening), lambda directive: None)


def test_what_was_told_is_what_is_written_in_the_next_saves() -> None:
    session = session_of()
    first = session.shares.complete_order(REQUEST)
    again = session.shares.complete_order(replace(REQUEST, step=2, structure=None))
    assert first.structure == STRUCTURE
    assert first == SaveOrder(
        rank=1, world_size=2, step=1, claim=0, nonce="0", structure=STRUCTURE, values=()
    )
    assert again == replace(first, step=2)
    assert again.structure is first.structure
    assert (again.structure.aliases, again.structure.key_paths) == ({"v": "s"}, '{"s": ["a", 0, "s"]}')


@pytest.mark.parametrize(
    "other",
    [
        replace(STRUCTURE, tensors=ROWS[:1]),
        replace(STRUCTURE, tensors=(replace(ROWS[0], start=8), ROWS[1])),
        replace(STRUCTURE, tensors=(replace(ROWS[0], fqn="w"), ROWS[1])),
        replace(STRUCTURE, tensors=(replace(ROWS[0], global_shape=(8, 8)), ROWS[1])),
        replace(STRUCTURE, aliases={}),
        replace(STRUCTURE, key_paths='{"s": ["a", 1, "s"]}'),
    ],
)
def test_another_structure_has_another_key_and_only_the_last_is_held(other: Structure) -> None:
    session = session_of()
    assert other.key != STRUCTURE.key
    session.shares.complete_order(REQUEST)
    following = session.shares.complete_order(replace(REQUEST, structure_key=other.key, structure=other.text))
    assert following.structure == other
    with pytest.raises(CompanionError, match="by a structure that wasn't told"):
        session.shares.complete_order(replace(REQUEST, structure=None))


def test_nothing_is_written_by_a_key_that_what_was_told_does_not_have() -> None:
    session, other = session_of(), replace(STRUCTURE, aliases={})
    with pytest.raises(CompanionError, match="by a structure that wasn't told"):
        session.shares.complete_order(replace(REQUEST, structure=other.text))
    with pytest.raises(CompanionError, match="by a structure that wasn't told"):
        session.shares.complete_order(replace(REQUEST, structure=None))
