"""Where a rehearsal preempts a training, and what it says of two trainings."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stepkeeper.supervise.rehearsal_rules import (
    StateComparison,
    StepRecord,
    choose_preemptions,
    describe_plan,
    judge_rehearsal,
)


@pytest.mark.parametrize("seed", range(20))
def test_preemptions_come_at_different_steps_before_the_last_one_half_of_them_by_kills(seed: int) -> None:
    plan = choose_preemptions(seed, 4, 10, 30)
    steps = [each.step or 0 for each in plan]
    assert steps == sorted(set(steps))
    assert steps[0] >= 1
    assert steps[-1] < 10
    assert sum(each.kills for each in plan) == 2
    assert plan == choose_preemptions(seed, 4, 10, 30)


def test_short_trainings_have_fewer() -> None:
    assert len(choose_preemptions(0, 3, 3, 30)) == 2
    assert describe_plan(choose_preemptions(0, 3, 1, 30)) == "no step to preempt it at"


LOSSES = {step: f"0.{step}" for step in range(1, 7)}


def recorded(*steps: int, **wrong: str) -> list[StepRecord]:
    """The steps with their losses, or with those of `wrong`, by step_N."""
    return [StepRecord(step=n, metrics={"loss": wrong.get(f"step_{n}", LOSSES[n])}) for n in steps]


def timed(records: Sequence[StepRecord], seconds: str) -> list[StepRecord]:
    """The records with a metric that differs between any two trainings."""
    return [replace(each, metrics={**each.metrics, "seconds": seconds}) for each in records]


def state(*differing: str, steps: tuple[int, int] = (6, 6), has_random_state: bool = True) -> StateComparison:
    return StateComparison(
        steps=steps, equal=("b", "step"), differing=differing, has_random_state=has_random_state
    )


WHOLE = recorded(1, 2, 3, 4, 5, 6)


def test_equal_trainings_resume_exactly() -> None:
    result = judge_rehearsal(WHOLE, [recorded(1, 2, 3), recorded(2, 3, 4, 5, 6)], state())
    assert result.is_exact
    assert result.lines == (
        "the training resumes exactly: 2 tensors and values of step 6, and loss of 6 steps, are equal bit for bit",
    )


@pytest.mark.parametrize(
    ("attempts", "compared", "lines"),
    [
        (
            [recorded(1, 2, 3), recorded(3, 4, step_4="0.5")],
            state("w"),
            [
                "the training doesn't resume exactly",
                "loss differs first, at step 4: 0.4 undisturbed, 0.5 preempted",
                "of the final state 1 of 3 differ: w",
            ],
        ),
        # Done again, a step has another loss.
        (
            [recorded(1, 2, 3), recorded(2, 3, step_2="0.7")],
            state(),
            [
                "the training doesn't resume exactly",
                "loss differs first, at step 2: 0.2 undisturbed, 0.7 preempted",
            ],
        ),
        (
            [recorded(1, 2, 3, step_2="0.7"), recorded(3, 4)],
            state("w"),
            [
                "two trainings differ before any preemption: set the seeds, so that they can be compared",
                "loss differs first, at step 2: 0.2 undisturbed, 0.7 preempted",
                "of the final state 1 of 3 differ: w",
            ],
        ),
        (
            [recorded(1, 2), recorded(3, 4)],
            state(steps=(6, 4)),
            ["the training doesn't resume exactly", "the last steps differ: 6 undisturbed, 4 preempted"],
        ),
        (
            [recorded(1, 2), recorded(3, 4)],
            state("w", has_random_state=False),
            [
                "the training doesn't resume exactly",
                "of the final state 1 of 3 differ: w",
                'the state has no random numbers: put {"random": stepkeeper.RandomState()} into it',
            ],
        ),
    ],
)
def test_what_differs_is_named(
    attempts: list[list[StepRecord]], compared: StateComparison, lines: list[str]
) -> None:
    result = judge_rehearsal(WHOLE, attempts, compared)
    assert (result.is_exact, list(result.lines)) == (False, lines)


def test_metrics_that_differ_without_a_preemption_prove_nothing_if_the_states_are_equal() -> None:
    whole, attempts = timed(WHOLE, "1"), [timed(recorded(1, 2, 3), "2"), timed(recorded(4, 5, 6), "3")]
    equal = judge_rehearsal(whole, attempts, state())
    assert equal.is_exact
    assert "and loss of 6 steps, are equal" in equal.lines[0]
    assert equal.lines[1] == "not compared, since they differ without a preemption: seconds"
    wrong = [attempts[0], timed(recorded(4, step_4="9"), "3")]
    assert judge_rehearsal(whole, wrong, state("w")).lines == (
        "the training doesn't resume exactly",
        "loss differs first, at step 4: 0.4 undisturbed, 9 preempted",
        "of the final state 1 of 3 differ: w",
    )


@pytest.mark.parametrize(
    "attempts",
    [
        pytest.param([WHOLE], id="too short to be preempted"),
        pytest.param([recorded(1, 2, 3), WHOLE], id="it restores nothing"),
        pytest.param([WHOLE, []], id="stopped at its last step"),
    ],
)
def test_equal_trainings_of_which_none_continued_from_a_checkpoint_prove_nothing(
    attempts: list[list[StepRecord]],
) -> None:
    result = judge_rehearsal(WHOLE, attempts, state())
    assert not result.is_exact
    assert result.lines[0] == "it isn't shown whether the training resumes exactly"
    assert "no start has trained on from a checkpoint: call manager.restore(state)" in result.lines[1]


def test_without_metrics_it_says_so() -> None:
    plain = [StepRecord(step=1), StepRecord(step=2)]
    result = judge_rehearsal(plain, [plain[:1], plain[1:]], state())
    assert result.is_exact
    assert (
        result.lines[1] == "losses were not compared: pass them as manager.step(step, state, {'loss': loss})"
    )
