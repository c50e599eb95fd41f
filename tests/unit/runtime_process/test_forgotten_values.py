"""Test which numbers of a state count as forgotten, and which as constants or kept up to date."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepkeeper import PerRank, RandomState, Whole
from stepkeeper.save.watch.forgotten_values import Forgotten, ForgottenValues

MODEL = torch.nn.Linear(2, 2)


def told(build: Callable[[int], Any], n_saves: int = 30) -> list[Forgotten]:
    watch = ForgottenValues()
    found = (watch.find_forgotten(step, build(step)) for step in range(10, 10 * n_saves + 1, 10))
    return [each for each in found if each is not None]


FORGOTTEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tokens": ({"model": MODEL, "random": RandomState(), "tokens": 0}, ["tokens = 0"]),
    "rows": ({"model": MODEL, "rows_so_far": 0}, ["rows_so_far = 0"]),
    "several, beside an epoch": ({"epoch": 0, "samples": 0, "rows": 0.0}, ["samples = 0, rows = 0.0"]),
    "a deep one": ({"trainer": {"progress": Whole({"images": 0})}}, ["trainer.progress.images = 0"]),
    "a rank's own": ({"own": PerRank({"records": 0})}, ["own.records = 0"]),
}  # fmt: skip


@pytest.mark.parametrize(("state", "names"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_count_of_work_that_nobody_sets_is_a_warning_once(state: dict[str, Any], names: list[str]) -> None:
    (found,) = told(lambda step: state)
    assert found.level == logging.WARNING
    assert all(f"({name})" in found.text for name in names), found.text
    assert "saves of step 10 to 50" in found.text


MAYBE: dict[str, tuple[dict[str, Any], str]] = {
    "a long epoch": ({"model": MODEL, "epoch": 3}, "epoch = 3"),
    "the first epoch": ({"model": MODEL, "epoch": 0}, "epoch = 0"),
    "nothing validated yet": ({"best_loss": float("inf"), "best_acc": 0.0}, "best_loss = inf, best_acc = 0.0"),
    "nothing went wrong yet": ({"skipped": 0, "restarts": 0}, "skipped = 0, restarts = 0"),
    "a sum": ({"loss_sum": 0.0}, "loss_sum = 0.0"),
}  # fmt: skip


@pytest.mark.parametrize(("state", "names"), MAYBE.values(), ids=MAYBE)
def test_what_may_be_slow_or_a_constant_is_told_after_many_saves_and_never_a_warning(
    state: dict[str, Any], names: str
) -> None:
    assert told(lambda step: state, n_saves=19) == []
    (found,) = told(lambda step: state)
    assert found.level == logging.INFO
    assert f"saves of step 10 to 200 ({names})" in found.text


CONSTANTS: dict[str, dict[str, Any]] = {
    "none at all": {"model": MODEL},
    "what isn't where a counter begins": {"batch": 8, "classes": 10, "target_loss": 0.5, "name": "run 1"},
    "names of constants": {
        "seed": 0, "rank": 0, "fold": 0, "dropout": 0.0, "weight_decay": 0.0, "warmup_steps": 0, "num_workers": 0,
        "run": 0, "trial": 0, "stage": 0, "task": 0, "phase": 0, "task_index": 0,
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
