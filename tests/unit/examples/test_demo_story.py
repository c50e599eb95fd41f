"""The demo exits non-zero if something it claims did not happen: each claim, broken once."""

import dataclasses
from collections.abc import Callable

import pytest

from demo.story import Attempt, Commit, Disruption, Resume, StepSeen, Story, broken_claims, lost_steps

FAULTS = ["Spot preemption", "Power cut"]


def _steps(first: int, last: int, *, begin_s: float) -> list[StepSeen]:
    return [
        StepSeen(
            at_s=begin_s + 0.2 * (step - first), step=step, epoch=0, loss=1 / step, exact=(1 / step).hex()
        )
        for step in range(first, last + 1)
    ]


def _story() -> Story:
    at_notice, periodic = Commit(at_s=3, sequence=2, step=9), Commit(at_s=12, sequence=4, step=15)
    return Story(
        total_steps=25,
        attempts=[
            Attempt(pod="a", node="n1", steps=_steps(1, 9, begin_s=1)),
            Attempt(pod="b", node="n2", steps=_steps(10, 18, begin_s=10), resume=_resume(at_notice)),
            Attempt(pod="c", node="n1", steps=_steps(16, 25, begin_s=20), resume=_resume(periodic)),
        ],
        commits=[at_notice, periodic],
        disruptions=[
            Disruption(at_s=2.5, name="Spot preemption", node="n1"),
            Disruption(at_s=12, name="Power cut", node="n2"),
        ],
        complete_at_s=25,
    )


def _resume(restored: Commit, named: Commit | None = None) -> Resume:
    return Resume(restored=restored, named=named or restored)


def test_a_run_as_it_should_be_breaks_no_claim() -> None:
    assert broken_claims(_story(), disruptions=FAULTS) == []


def test_lost_are_the_steps_behind_the_commit_that_was_resumed() -> None:
    assert [[s.step for s in lost_steps(_story(), i)] for i in range(3)] == [[], [16, 17, 18], []]


def _other_loss(story: Story) -> None:
    step = story.attempts[2].steps[1]
    story.attempts[2].steps[1] = dataclasses.replace(step, exact="0x1.8p+0")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: setattr(s, "complete_at_s", None), "did not become Complete"),
        (lambda s: s.disruptions.pop(), "the disruptions were"),
        (lambda s: setattr(s.attempts[2], "resume", _resume(s.commits[0], s.commits[1])), "the log named"),
        (lambda s: s.attempts[2].steps.pop(0), "went on with 17"),
        (lambda s: s.attempts[0].steps.pop(3), "no line was seen of steps"),
        (_other_loss, "step 17 had loss"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_claim_is_checked(spoil: Callable[[Story], object], said: str) -> None:
    story = _story()
    spoil(story)
    assert any(said in line for line in broken_claims(story, disruptions=FAULTS))
