"""Python's garbage collector pauses while a state is planned, and is then as the training had it."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from stepkeeper_planners.garbage import without_collections


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("error", [None, ValueError("no plan")], ids=["it is planned", "planning fails"])
def test_the_collector_is_off_meanwhile_and_then_as_before(is_on: bool, error: Exception | None) -> None:
    if not is_on:
        gc.disable()

    @without_collections()
    def plan() -> None:
        assert not gc.isenabled()
        if error is not None:
            raise error

    for _ in range(2):
        with nullcontext() if error is None else pytest.raises(ValueError, match="no plan"):
            plan()
        assert gc.isenabled() == is_on


def test_it_stays_off_until_the_outer_plan_is_made() -> None:
    with without_collections():
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
