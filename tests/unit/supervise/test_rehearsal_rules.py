"""Where a rehearsal preempts a training, and what it says of two trainings."""

from collections.abc import Sequence

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


def recorded(*steps: int, python: int = 1, **wrong: str) -> list[StepRecord]:
    """The steps with their losses, or with those of `wrong`, by step_N."""
    return [
        StepRecord(step=n, metrics={"loss": wrong.get(f"step_{n}", LOSSES[n])}, generators={"python": python})
        for n in steps
    ]


def state(
    *differing: str, steps: tuple[int, int] = (6, 6), generators: Sequence[str] | None = ()
) -> StateComparison:
    found = None if generators is None else frozenset(generators)
    return StateComparison(steps=steps, equal=("b", "step"), differing=differing, generators=found)


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
            state(generators=["torch"]),
            ["the training doesn't resume exactly", "the random numbers of torch differ at the end"],
        ),
        (
            [recorded(1, 2), recorded(3, 4)],
            state("w", generators=None),
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


def test_generators_without_a_seed_differ_from_the_beginning_and_prove_nothing() -> None:
    attempts = [recorded(1, 2, 3, python=5), recorded(4, 5, 6, python=5)]
    assert judge_rehearsal(WHOLE, attempts, state(generators=["python"])).is_exact
    assert not judge_rehearsal(WHOLE, attempts, state(generators=["numpy", "python"])).is_exact


def test_what_may_differ_is_left_out() -> None:
    attempts = [recorded(1, 2, 3), recorded(4, step_4="9")]
    assert judge_rehearsal(WHOLE, attempts, state("timer.seconds"), ["loss", "timer.*"]).is_exact
    assert not judge_rehearsal(WHOLE, attempts, state("timer.seconds"), ["timer.*"]).is_exact


def test_without_metrics_it_says_so() -> None:
    plain = [StepRecord(step=1), StepRecord(step=2)]
    result = judge_rehearsal(plain, [plain], state())
    assert result.is_exact
    assert (
        result.lines[1] == "losses were not compared: pass them as manager.step(step, state, {'loss': loss})"
    )
