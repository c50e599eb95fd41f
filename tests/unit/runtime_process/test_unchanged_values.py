"""Test which plain values of a state are told of because they never change, and which aren't."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stepkeeper import PerRank, RandomState, Whole
from stepkeeper.save.watch.unchanged_values import UnchangedValues

MODEL = torch.nn.Linear(2, 2)


def told(build: Callable[[int], Any], n_saves: int = 30, *, is_built: bool = False) -> list[str]:
    watch = UnchangedValues()
    steps = range(10, 10 * n_saves + 1, 10)
    found = (watch.find_unchanged(step, build(step), is_built=is_built) for step in steps)
    return [each for each in found if each is not None]


UNCHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "a count": ({"model": MODEL, "random": RandomState(), "tokens": 0}, "tokens = 0"),
    "an epoch": ({"model": MODEL, "epoch": 3}, "epoch = 3"),
    "nothing validated yet": ({"best_loss": float("inf"), "best_acc": 0.0}, "best_loss = inf, best_acc = 0.0"),
    "a learning rate": ({"model": MODEL, "lr": 0.1}, "lr = 0.1"),
    "text": ({"model": MODEL, "stage": "warm-up"}, "stage = 'warm-up'"),
    "numpy's": ({"seen": np.int64(3)}, "seen = np.int64(3)"),
    "a deep one": ({"trainer": {"progress": Whole({"images": 0})}}, "trainer.progress.images = 0"),
    "a rank's own": ({"own": PerRank({"records": 0})}, "own.records = 0"),
    "beside tensors": ({"w": torch.zeros(2), "games": 0}, "games = 0"),
}  # fmt: skip


@pytest.mark.parametrize(("state", "names"), UNCHANGED.values(), ids=UNCHANGED)
def test_what_stands_in_the_state_and_never_changes_is_told_once_by_name(
    state: dict[str, Any], names: str
) -> None:
    assert told(lambda step: state, n_saves=4) == []
    (said,) = told(lambda step: state)
    assert said.startswith(f"{names} in the state didn't change in the saves of step 10 to 50.")


def test_what_changes_hides_nothing_that_does_not() -> None:
    state: dict[str, Any] = {"model": MODEL, "step": 0, "epoch": 0, "trainer": {"n": 0, "rows": 0}}

    def build(step: int) -> dict[str, Any]:
        state["step"] = state["trainer"]["n"] = step
        return state

    (said,) = told(build)
    assert said.startswith("epoch = 0, trainer.rows = 0 in the state didn't change")


def test_what_counts_by_its_name_is_told_earlier_and_takes_the_rest_along() -> None:
    state = {"step": 7, "lr": 0.1, "rng_state": torch.get_rng_state()}
    assert told(lambda step: state, n_saves=2) == []
    (said,) = told(lambda step: state)
    assert said.startswith("step = 7 in the state didn't change in the saves of step 10 to 30, and a restart")
    assert "rng_state in the state is the same object" in said
    assert "lr = 0.1 in the state didn't change in the saves of step 10 to 30 either" in said


@pytest.mark.parametrize("is_built", [False, True])
def test_a_counter_is_told_of_also_where_the_state_is_built_for_each_save(is_built: bool) -> None:
    (said,) = told(lambda step: {"step": 7, "lr": 0.1, "model": MODEL}, is_built=is_built)
    assert "step = 7" in said
    assert "lr" not in said


QUIET: dict[str, Callable[[int], Any]] = {
    "nothing plain": lambda step: {"model": MODEL},
    "built for each save": lambda step: {"model": MODEL, "epoch": 0, "lr": 0.1},
    "built for each save, of tensors": lambda step: {"w": torch.zeros(2), "lr": 0.1},
    "a state_dict": lambda step: {"model": MODEL.state_dict(), "epoch": 0},
    "an object in place of a dict": lambda step: MODEL,
    "one step, again and again": lambda step: {"epoch": 0},
}  # fmt: skip


@pytest.mark.parametrize("build", QUIET.values(), ids=QUIET)
def test_what_is_of_this_moment_is_not_told(build: Callable[[int], Any]) -> None:
    assert told(build) == []


KEPT: dict[str, dict[str, Any]] = {
    "settings": {"args": {"retries": 0}, "model_config": {"skip": 0}, "hparams": {"mixup": 0.0}},
    "an object's": {"loader": RandomState()},
    "what numbers name": {"state": {0: {"games": 0}}},
    "what a log says": {"log": [{"step": 1, "loss": 0.5}]},
}  # fmt: skip


@pytest.mark.parametrize("state", KEPT.values(), ids=KEPT)
def test_what_is_the_trainings_own_business_is_not_told(state: dict[str, Any]) -> None:
    assert told(lambda step: state) == []


def test_a_dict_that_gets_keys_is_a_log() -> None:
    log: dict[str, int] = {}

    def build(step: int) -> dict[str, Any]:
        log[f"at {step}"] = step
        return {"model": MODEL, "log": log}

    assert told(build) == []


def test_several_saves_of_one_step_are_one() -> None:
    watch, state = UnchangedValues(), {"epoch": 0}
    assert [watch.find_unchanged(7, state) for _ in range(12)] == [None] * 12


def test_a_long_list_is_cut_and_counted() -> None:
    state = {f"n{number}": number for number in range(50)}
    (said,) = told(lambda step: state)
    assert "n19 = 19, … (50) in the state" in said


def test_a_state_with_tensors_is_not_held() -> None:
    watch = UnchangedValues()
    state = {"w": torch.zeros(2), "epoch": 0}
    assert watch.find_unchanged(1, state) is None
    before = len([each for each in gc.get_referrers(state) if isinstance(each, list | tuple | dict)])
    assert before <= 1, "this module's frame"


def test_a_generators_state_of_inference_mode_is_compared_by_itself() -> None:
    with torch.inference_mode():
        state = {"step": 7, "rng_state": torch.get_rng_state().clone()}
    (said,) = told(lambda step: state)
    assert "rng_state" in said
