"""Decide when to save, by frozen values that are asked after each step. Clocks and counts come in as arguments."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from stepkeeper.contract import Interval, IntervalType

__all__ = [
    "AnyOf",
    "AtSteps",
    "Auto",
    "Continuous",
    "Disruptions",
    "EveryNSteps",
    "EverySeconds",
    "Moment",
    "OnPreemption",
    "SaveCost",
    "SavePolicy",
    "from_interval",
    "parts_of",
]

_DAY_S: Final = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """The measured cost of this process's saves so far."""

    stall_s: float
    """Seconds that the train thread waited for one save."""

    duration_s: float
    """Seconds from the call to the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruptions:
    """Number of times that this training was ended from outside, as far as it is known."""

    count: int = 0
    """Number of disruptions."""

    over_s: float = 0.0
    """Length, in seconds, of the time in which they were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A finished step, and what is known at it.

    The defaults are what every rank knows without asking the others.
    """

    step: int
    """The finished step."""

    stopping: bool = False
    """True if all ranks agreed to stop at this step, and it isn't being saved yet."""

    since_save_s: float = 0.0
    """Seconds since the last save started, or the training did."""

    saving: bool = True
    """True if a save is in flight."""

    cost: SaveCost | None = None
    """The measured cost of saves; None before the first has ended."""

    disruptions: Disruptions = Disruptions()
    """The disruptions of this training so far."""


class SavePolicy(Protocol):
    """Decide whether to save the step that was just finished."""

    def due(self, moment: Moment) -> bool:
        """Return True if the step is to be saved.

        Args:
            moment: The finished step, and what is known at it.

        """
        ...


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Save the steps that are multiples of `steps`.

    Args:
        steps: Number of steps, at least 1.

    Raises:
        ValueError: `steps` is less than 1.

    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a save interval has at least 1 step, not {self.steps}")

    def due(self, moment: Moment) -> bool:
        """Return True if the step is a multiple of `steps`."""
        return moment.step % self.steps == 0


@dataclass(frozen=True, slots=True)
class AtSteps:
    """Save the given steps: the last one of a training, whose result it was run for, or any others.

    Args:
        steps: The steps to save.

    """

    steps: tuple[int, ...]

    def due(self, moment: Moment) -> bool:
        """Return True if the step is one of `steps`."""
        return moment.step in self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when `seconds` have passed since the last save started.

    Args:
        seconds: Seconds between saves, greater than 0.

    Raises:
        ValueError: `seconds` isn't greater than 0.

    """

    seconds: float

    def __post_init__(self) -> None:
        _check_positive("a save interval", self.seconds)

    def due(self, moment: Moment) -> bool:
        """Return True if `seconds` have passed."""
        return moment.since_save_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Continuous:
    """Save whenever no save is in flight and `minimum_s` have passed since the last one started.

    Args:
        minimum_s: Least seconds between the starts of two saves, at least 0.

    Raises:
        ValueError: `minimum_s` is negative.

    """

    minimum_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.minimum_s >= 0:
            raise ValueError(f"the least time between saves is 0 s or longer, not {self.minimum_s}")

    def due(self, moment: Moment) -> bool:
        """Return True if no save is in flight and `minimum_s` have passed."""
        return not moment.saving and moment.since_save_s >= self.minimum_s


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Save the step that all ranks agreed to stop at, after a notice."""

    def due(self, moment: Moment) -> bool:
        """Return True if all ranks stop at this step."""
        return moment.stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Choose the interval at which saving and repeating lost steps cost least, by Young's and Daly's estimate.

    The cost of a save is measured. The rate of disruptions is this training's own so far, weighed with an assumed
    rate as if `assumed_weight` disruptions had been seen at that rate. Nothing is measured before the first save:
    it comes after `least_s`.

    Raises:
        ValueError: A time or weight isn't greater than 0, the bounds are in the wrong order, or `background_share`
            isn't from 0 to 1.

    """

    least_s: float = 60.0
    """Lower bound of the interval in seconds, whatever is measured."""

    most_s: float = 3600.0
    """Upper bound of the interval in seconds, whatever is measured."""

    assumed_between_s: float = _DAY_S
    """Assumed mean seconds between disruptions."""

    assumed_weight: float = 1.0
    """Number of disruptions that the assumption counts as."""

    background_share: float = 0.05
    """Share of the training's speed that a save in flight takes, from 0 to 1: part of the save's cost."""

    def __post_init__(self) -> None:
        for name in ("least_s", "most_s", "assumed_between_s", "assumed_weight"):
            _check_positive(f"Auto's {name}", getattr(self, name))
        if self.least_s > self.most_s:
            raise ValueError(f"Auto's least_s={self.least_s} is more than its most_s={self.most_s}")
        if not 0 <= self.background_share <= 1:
            raise ValueError(f"Auto's background_share is from 0 to 1, not {self.background_share}")

    def due(self, moment: Moment) -> bool:
        """Return True if no save is in flight and the interval has passed."""
        if moment.saving:
            return False
        return moment.since_save_s >= self.interval_s(moment.cost, moment.disruptions)

    def interval_s(self, cost: SaveCost | None, disruptions: Disruptions) -> float:
        """Return the seconds from the start of one save to the start of the next; never less than a save takes.

        Args:
            cost: The measured cost of a save; None before the first.
            disruptions: The disruptions of this training so far.

        """
        if cost is None:
            return self.least_s
        between_s = (self.assumed_between_s * self.assumed_weight + disruptions.over_s) / (
            self.assumed_weight + disruptions.count
        )
        lost_s = cost.stall_s + self.background_share * cost.duration_s
        best_s = max(_daly_s(lost_s, between_s), cost.duration_s)
        return min(max(best_s, self.least_s), self.most_s)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Save when at least one of `policies` says so.

    Args:
        policies: The policies to combine.

    """

    policies: tuple[SavePolicy, ...]

    def due(self, moment: Moment) -> bool:
        """Return True if the step is due by any of the policies."""
        return any(policy.due(moment) for policy in self.policies)


def parts_of(policy: SavePolicy) -> Iterator[SavePolicy]:
    """Yield `policy`, or all policies that it combines."""
    if isinstance(policy, AnyOf):
        for part in policy.policies:
            yield from parts_of(part)
    else:
        yield policy


def from_interval(interval: Interval) -> SavePolicy:
    """Return the policy that a job's interval asks for."""
    policies = _of_type(interval)
    return policies[0] if len(policies) == 1 else AnyOf(tuple(policies))


def _of_type(interval: Interval) -> list[SavePolicy]:
    match interval.type:
        case IntervalType.AUTO:
            most_s = Auto().most_s if interval.seconds is None else interval.seconds
            return [Auto(least_s=min(Auto().least_s, most_s), most_s=most_s)]
        case IntervalType.CONTINUOUS:
            return [Continuous(interval.seconds or 0)]
        case IntervalType.FIXED:
            policies: list[SavePolicy] = []
            if interval.steps is not None:
                policies.append(EveryNSteps(interval.steps))
            if interval.seconds is not None:
                policies.append(EverySeconds(interval.seconds))
            return policies


def _daly_s(cost_s: float, between_s: float) -> float:
    """Estimate the interval that costs least, by Daly's higher-order formula.

    If a save costs as much as two times between disruptions, saving sooner gains nothing.

    Args:
        cost_s: Seconds that a save costs.
        between_s: Mean seconds between disruptions.

    """
    if cost_s >= 2 * between_s:
        return between_s
    half = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(half) / 3 + half / 9)


def _check_positive(what: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{what} is longer than 0 s, not {value}")
