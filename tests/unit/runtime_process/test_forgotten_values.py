"""Test which numbers of a state count as forgotten, and which as constants or kept up to date."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepkeeper import PerRank, RandomState, Whole
from stepkeeper.save.watch.forgotten_values import ForgottenValues

MODEL = torch.nn.Linear(2, 2)


def told(build: Callable[[int], Any], n_saves: int = 12) -> list[str]:
    watch = ForgottenValues()
    found = (watch.find_forgotten(step, build(step)) for step in range(10, 10 * n_saves + 1, 10))
    return [each for each in found if each is not None]


FORGOTTEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an epoch": ({"model": MODEL, "epoch": 3}, ["epoch = 3"]),
    "a counter of any name": (
        {"model": MODEL, "random": RandomState(), "rows_so_far": 0},
        ["rows_so_far = 0"],
    ),
    "a sum": ({"loss_sum": 0.0}, ["loss_sum = 0.0"]),
    "the best so far": ({"best_loss": float("inf"), "best_name": "none yet"}, ["best_loss = inf"]),
    "several": ({"epoch": 0, "done": 0, "lr": 0.0}, ["epoch = 0, done = 0"]),
    "a deep one": ({"trainer": {"progress": Whole({"games": 0})}}, ["trainer.progress.games = 0"]),
    "a rank's own": ({"own": PerRank({"read": 0})}, ["own.read = 0"]),
}


@pytest.mark.parametrize(("state", "names"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_number_that_nobody_sets_is_told_once(state: dict[str, Any], names: list[str]) -> None:
    (message,) = told(lambda step: state)
    assert all(f"({name})" in message for name in names), message
    assert "saves of step 10 to 50" in message


CONSTANTS: dict[str, dict[str, Any]] = {
    "none at all": {"model": MODEL},
    "what isn't where a counter begins": {"batch": 8, "classes": 10, "target_loss": 0.5, "name": "run 1"},
    "names of constants": {
        "seed": 0, "rank": 0, "fold": 0, "dropout": 0.0, "weight_decay": 0.0, "warmup_steps": 0, "num_workers": 0,
        "lr": 0.0, "label_smoothing": 0.0, "pad_id": 0, "version": 0, "l2_reg": 0, "min_delta": 0.0,
    },
    "what counts by its name, and is told earlier": {"step": 0, "updates": 0},
    "flags": {"resumed": False, "compiled": True},
    "settings": {"args": {"retries": 0}, "model_config": {"skip": 0}, "hparams": {"mixup": 0.0}},
    "an object's": {"loader": RandomState()},
    "what numbers name": {"state": {0: {"games": 0}}},
    "beside tensors": {"w": torch.zeros(2), "games": 0},
    "a state_dict": {"model": MODEL.state_dict(), "games": 0},
}  # fmt: skip


@pytest.mark.parametrize("state", CONSTANTS.values(), ids=CONSTANTS)
def test_constants_are_not_told(state: dict[str, Any]) -> None:
    assert told(lambda step: state) == []


def test_a_state_that_is_built_for_each_save_has_the_numbers_of_the_moment() -> None:
    assert told(lambda step: {"model": MODEL, "epoch": 0}) == []


def test_who_sets_one_number_sets_the_others() -> None:
    state: dict[str, Any] = {"model": MODEL, "epoch": 0, "best": 0.0, "trainer": {"n": 0}}

    def build(step: int) -> dict[str, Any]:
        state["trainer"]["n"] = step
        return state

    assert told(build) == []


def test_a_few_saves_say_nothing_nor_do_those_of_one_step() -> None:
    state = {"epoch": 0}
    assert told(lambda step: state, n_saves=4) == []
    watch = ForgottenValues()
    assert [watch.find_forgotten(7, state) for _ in range(12)] == [None] * 12


def test_an_object_in_place_of_a_dict_says_nothing() -> None:
    assert told(lambda step: MODEL) == []
