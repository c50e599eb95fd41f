"""Choose where a rehearsal preempts a training, and judge whether the training resumed exactly. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from stepkeeper.contract import Rehearsal

__all__ = [
    "MetricDifference",
    "StepMetrics",
    "choose_preemptions",
    "describe_plan",
    "find_difference",
    "select_names",
]

StepMetrics = tuple[int, Mapping[str, str]]
"""A finished step, and its metrics as texts that have all bits."""

_MOST_RANKS: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """The first step at which a metric isn't that of the undisturbed training."""

    name: str
    step: int
    undisturbed: str | None
    """None: the undisturbed training has no such step or metric."""

    preempted: str


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
    return ", ".join(f"{'SIGKILL' if each.kills else 'a notice'} at step {each.step}" for each in plan)


def find_difference(
    undisturbed: Sequence[StepMetrics], preempted: Sequence[StepMetrics], ignored: Sequence[str]
) -> MetricDifference | None:
    """Find the first step of the preempted training with another metric than the undisturbed one has."""
    known = dict(undisturbed)
    for step, metrics in sorted(preempted, key=lambda each: each[0]):
        for name in select_names(metrics, ignored):
            was = known.get(step, {}).get(name)
            if was != metrics[name]:
                return MetricDifference(name=name, step=step, undisturbed=was, preempted=metrics[name])
    return None


def select_names(names: Sequence[str] | Mapping[str, str], ignored: Sequence[str]) -> tuple[str, ...]:
    """Return the names that match no pattern of `ignored`."""
    return tuple(name for name in names if not any(fnmatchcase(name, pattern) for pattern in ignored))
