"""Choose where a rehearsal preempts a training, and judge whether the training resumed exactly. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stepkeeper.contract import Rehearsal
from stepkeeper.quantities import count_text

__all__ = [
    "Result",
    "StateComparison",
    "StepRecord",
    "choose_preemptions",
    "describe_plan",
    "judge_rehearsal",
]

_MOST_RANKS: Final = 1 << 16
_MOST_NAMES: Final = 10
_NONE_CONTINUED: Final = (
    "no start has trained on from a checkpoint: call manager.restore(state) before the loop, "
    "and rehearse more steps"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A finished step, as a rank recorded it."""

    step: int
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The metrics as texts that have all bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """The comparison of the latest commits of two roots."""

    steps: tuple[int | None, int | None]
    """The step of each; None: the root has no commit."""

    equal: tuple[str, ...] = ()
    """The flat names of tensors and values that are equal."""

    differing: tuple[str, ...] = ()
    """Those that differ, or that only one has."""

    has_random_state: bool = True
    """False if neither has the random number generators of a RandomState."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a rehearsal."""

    is_exact: bool
    lines: tuple[str, ...]
    """The explanation, for a person."""


def choose_preemptions(seed: int, n_preemptions: int, n_steps: int, grace_s: int) -> tuple[Rehearsal, ...]:
    """Choose different steps before the last one, in ascending order; as many as there are, if they are fewer.

    Half of the preemptions, in random order, kill a process without a notice.
    """
    chance = random.Random(seed)  # noqa: S311  # no secret
    steps = sorted(chance.sample(range(1, n_steps), min(n_preemptions, max(0, n_steps - 1))))
    kills = [number % 2 == 1 for number in range(len(steps))]
    chance.shuffle(kills)
    return tuple(
        Rehearsal(step=step, kills=kill, rank=chance.randrange(_MOST_RANKS), grace_s=grace_s)
        for step, kill in zip(steps, kills, strict=True)
    )


def describe_plan(plan: Sequence[Rehearsal]) -> str:
    """Describe the preemptions in one line."""
    found = [f"{'SIGKILL' if each.kills else 'a notice'} at step {each.step}" for each in plan]
    return ", ".join(found) or "no step to preempt it at"


def judge_rehearsal(
    undisturbed: Sequence[StepRecord], preempted: Sequence[Sequence[StepRecord]], state: StateComparison
) -> Result:
    """Judge by the records of all steps and the comparison of the final states.

    Metrics that differ before the first preemption, as durations do, prove nothing if the states are equal.

    Args:
        undisturbed: The records of the undisturbed training.
        preempted: Those of the preempted one, by attempt.
        state: The comparison of the final states.
    """
    early = _explain_metrics(undisturbed, preempted[0])
    found = _explain_metrics(undisturbed, [each for part in preempted for each in part])
    late = [text for name, text in found.items() if name not in early]
    lines = late[:1]
    if len(set(state.steps)) > 1:
        lines.append(f"the last steps differ: {state.steps[0]} undisturbed, {state.steps[1]} preempted")
    if state.differing:
        n_all = len(state.differing) + len(state.equal)
        lines.append(
            f"of the final state {len(state.differing)} of {n_all} differ: {_list_names(state.differing)}"
        )
    first = min(each.step for each in undisturbed)
    # A training that begins from scratch each time, by the same seeds, ends equal too.
    if not any(each.step > first for part in preempted[1:] for each in part[:1]):
        lines.append(_NONE_CONTINUED)
    if not lines:
        return Result(is_exact=True, lines=_describe_equal(undisturbed, state, early))
    if lines == [_NONE_CONTINUED]:
        return Result(is_exact=False, lines=("it isn't shown whether the training resumes exactly", *lines))
    if early and not late:
        title = "two trainings differ before any preemption: set the seeds, so that they can be compared"
        return Result(is_exact=False, lines=(title, *list(early.values())[:1], *lines))
    if not state.has_random_state:
        lines.append('the state has no random numbers: put {"random": stepkeeper.RandomState()} into it')
    return Result(is_exact=False, lines=("the training doesn't resume exactly", *lines))


def _explain_metrics(undisturbed: Sequence[StepRecord], found: Sequence[StepRecord]) -> dict[str, str]:
    """Explain for each metric in `found` where it differs first from the undisturbed training's, in order of steps."""
    known = {each.step: each.metrics for each in undisturbed}
    texts: dict[str, str] = {}
    for record in sorted(found, key=lambda each: each.step):
        for name, now in record.metrics.items():
            was = known.get(record.step, {}).get(name, "nothing")
            if was != now:
                text = f"{name} differs first, at step {record.step}: {was} undisturbed, {now} preempted"
                texts.setdefault(name, text)
    return texts


def _describe_equal(
    undisturbed: Sequence[StepRecord], state: StateComparison, early: Mapping[str, str]
) -> tuple[str, ...]:
    names = sorted({name for each in undisturbed for name in each.metrics} - {*early})
    what = f"{count_text(len(state.equal), 'tensor or value', 'tensors and values')} of step {state.steps[0]}"
    if names:
        what += f", and {', '.join(names)} of {count_text(len(undisturbed), 'step')},"
    lines = [f"the training resumes exactly: {what} are equal bit for bit"]
    if early:
        lines.append(f"not compared, since they differ without a preemption: {_list_names(sorted(early))}")
    elif not names:
        lines.append("losses were not compared: pass them as manager.step(step, state, {'loss': loss})")
    return tuple(lines)


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
