"""Choose where a rehearsal preempts a training, and judge whether the training resumed exactly. Pure."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A finished step, as a rank recorded it."""

    step: int
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The metrics as texts that have all bits."""

    generators: Mapping[str, int] = field(default_factory=dict)
    """Digests of the random number generators that begin with other numbers in each process, unless seeds are set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """The comparison of the latest commits of two roots."""

    steps: tuple[int | None, int | None]
    """The step of each; None: the root has no commit."""

    equal: tuple[str, ...] = ()
    """The flat names of tensors and values that are equal."""

    differing: tuple[str, ...] = ()
    """Those that differ, or that only one has."""

    generators: frozenset[str] | None = None
    """The random number generators of a RandomState that differ; None if the state has none. They are in neither list.
    """


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
    undisturbed: Sequence[StepRecord],
    preempted: Sequence[Sequence[StepRecord]],
    state: StateComparison,
    ignored: Sequence[str] = (),
) -> Result:
    """Judge by the records of all steps and the comparison of the final states.

    Args:
        undisturbed: The records of the undisturbed training.
        preempted: Those of the preempted one, by attempt.
        state: The comparison of the final states.
        ignored: Patterns of flat names and metrics that may differ.
    """
    known = {each.step: each for each in undisturbed}
    differing = _select(state.differing, ignored)
    early = _explain_metrics(known, preempted[0], ignored)
    metrics = early or _explain_metrics(known, [each for part in preempted for each in part], ignored)
    generators = (state.generators or frozenset()) - _find_unseeded(known, preempted[0])
    lines = [] if metrics is None else [metrics]
    if len(set(state.steps)) > 1:
        lines.append(f"the last steps differ: {state.steps[0]} undisturbed, {state.steps[1]} preempted")
    if differing:
        n_all = len(state.differing) + len(state.equal)
        lines.append(f"of the final state {len(differing)} of {n_all} differ: {_list_names(differing)}")
    if generators:
        lines.append(f"the random numbers of {', '.join(sorted(generators))} differ at the end")
    if not lines:
        return Result(is_exact=True, lines=_describe_equal(undisturbed, state, ignored))
    if early is not None:
        lines.insert(
            0, "two trainings differ before any preemption: set the seeds, so that they can be compared"
        )
    else:
        lines.insert(0, "the training doesn't resume exactly")
        if state.generators is None:
            lines.append('the state has no random numbers: put {"random": stepkeeper.RandomState()} into it')
    return Result(is_exact=False, lines=tuple(lines))


def _explain_metrics(
    known: Mapping[int, StepRecord], found: Iterable[StepRecord], ignored: Sequence[str]
) -> str | None:
    """Explain the first step of `found` with another metric than the undisturbed training has; None: there is none."""
    for record in sorted(found, key=lambda each: each.step):
        metrics = known[record.step].metrics if record.step in known else {}
        for name in _select(record.metrics, ignored):
            if metrics.get(name) != record.metrics[name]:
                was, now = metrics.get(name, "nothing"), record.metrics[name]
                return f"{name} differs first, at step {record.step}: {was} undisturbed, {now} preempted"
    return None


def _find_unseeded(known: Mapping[int, StepRecord], found: Sequence[StepRecord]) -> frozenset[str]:
    """Find the generators that differ already before a preemption: only a use of them would matter, and show."""
    first = next((each for each in found if each.step in known), None)
    if first is None:
        return frozenset()
    before = known[first.step].generators
    return frozenset(name for name, digest in first.generators.items() if before.get(name) != digest)


def _describe_equal(
    undisturbed: Sequence[StepRecord], state: StateComparison, ignored: Sequence[str]
) -> tuple[str, ...]:
    names = sorted({name for each in undisturbed for name in _select(each.metrics, ignored)})
    what = f"{count_text(len(state.equal), 'tensor or value', 'tensors and values')} of step {state.steps[0]}"
    if names:
        what += f", and {', '.join(names)} of {count_text(len(undisturbed), 'step')},"
    lines = (f"the training resumes exactly: {what} are equal bit for bit",)
    if names:
        return lines
    return (*lines, "losses were not compared: pass them as manager.step(step, state, {'loss': loss})")


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _select(names: Iterable[str], ignored: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(fnmatchcase(name, pattern) for pattern in ignored))
