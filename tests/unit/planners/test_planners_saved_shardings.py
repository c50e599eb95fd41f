"""Which shardings a load gives to tensors that have none of their own."""

import pytest

from stepkeeper_planners.loading.saved_shardings import PresentSharding, SavedShardings, choose_shardings

ROWS, COLUMNS = "{devices=[4,1]0,1,2,3}", "{devices=[1,4]0,1,2,3}"
HALVES = "{devices=[2,2]0,1,2,3 last_tile_dim_replicate}"
REPLICATED = "{replicated}"

SAVED = SavedShardings(n_devices=4, by_name={"w": ROWS, "head": ROWS, "b": HALVES, "step": REPLICATED})


def present(
    w: str, head: str = ROWS, *, b: str = "", step: str = "", inferred: str = ""
) -> dict[str, PresentSharding]:
    texts = {"w": (w, 2), "head": (head, 2), "b": (b, 1), "step": (step, 0), "unsaved": ("", 1)}
    return {
        fqn: PresentSharding(text=text, ndim=ndim, inferred=fqn == inferred)
        for fqn, (text, ndim) in texts.items()
    }


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        pytest.param(present(ROWS), {"b": HALVES, "step": REPLICATED}, id="what is open is as it was saved"),
        pytest.param(present(ROWS, b=REPLICATED), {"step": REPLICATED}, id="what is marked keeps its mark"),
        pytest.param(
            present(ROWS, b=REPLICATED, inferred="b"),
            {"b": HALVES, "step": REPLICATED},
            id="what priming inferred is as it was saved",
        ),
        pytest.param(present(COLUMNS), {}, id="a tensor is divided in another way: all stays open"),
        pytest.param(
            present(COLUMNS, inferred="w"),
            {"w": ROWS, "b": HALVES, "step": REPLICATED},
            id="what priming inferred says nothing of the layout",
        ),
        pytest.param(present(REPLICATED, REPLICATED), {}, id="nothing is divided any more: all stays open"),
        pytest.param(
            present(REPLICATED),
            {"b": HALVES, "step": REPLICATED},
            id="one tensor is replicated now, the layout is the same",
        ),
        pytest.param(
            present("", ""),
            {"w": ROWS, "head": ROWS, "b": HALVES, "step": REPLICATED},
            id="nothing is marked: all is as it was saved",
        ),
        pytest.param(
            present("{devices=[4,1]<=[4]}"),
            {"b": HALVES, "step": REPLICATED},
            id="the same tiles, written otherwise",
        ),
    ],
)
def test_open_shardings_are_the_saved_ones_in_the_same_layout(
    now: dict[str, PresentSharding], wanted: dict[str, str]
) -> None:
    assert choose_shardings(SAVED, now, 4) == wanted


def test_another_number_of_devices_leaves_all_open() -> None:
    assert choose_shardings(SAVED, present(REPLICATED, REPLICATED), 8) == {}
    assert choose_shardings(SAVED, present("", ""), 8) == {}


def test_a_sharding_that_cannot_be_read_is_left_open() -> None:
    saved = SavedShardings(
        n_devices=4, by_name={"w": ROWS, "b": "{devices=[2,2]0,1,2,3}", "step": "{new kind}"}
    )
    assert choose_shardings(saved, present(ROWS), 4) == {}
