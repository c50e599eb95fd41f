"""Policies that decide after each step whether to save it, as frozen values. Clocks are arguments."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from stepkeeper.contract import Interval
from stepkeeper.quantities import check_number, check_whole

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
    """The known number of times that this training was ended from outside."""

    count: int = 0
    """Number of disruptions."""

    over_s: float = 0.0
    """Seconds in which they were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A finished step, and the state of saves at it.

    The defaults are known to every rank without communication.
    """

    step: int
    """The finished step."""

    stopping: bool = False
    """True if all ranks agreed to stop at this step, and it isn't being saved yet."""

    since_save_s: float = 0.0
    """Seconds since the start of the last save, or of the training."""

    saving: bool = True
    """True if a save is in flight."""

    cost: SaveCost | None = None
    """The measured cost of saves; None before the end of the first."""

    disruptions: Disruptions = Disruptions()
    """The disruptions of this training so far."""


class SavePolicy(Protocol):
    """Decide whether to save the step that was just finished."""

    def due(self, moment: Moment) -> bool:
        """Return True if the step is to be saved.

        Args:
            moment: The finished step, and the state of saves at it.
        """
        ...


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Save the steps that are multiples of `steps`.

    Args:
        steps: Number of steps, at least 1.

    Raises:
        TypeError: `steps` isn't a whole number.
        ValueError: `steps` is less than 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("EveryNSteps.steps", self.steps, 1)

    def due(self, moment: Moment) -> bool:
        """Return True if the step is a multiple of `steps`."""
        return moment.step % self.steps == 0


@dataclass(frozen=True, slots=True)
class AtSteps:
    """Save the given steps, such as the last one of a training.

    Args:
        steps: The steps to save, each at least 0.

    Raises:
        TypeError: `steps` isn't a tuple of whole numbers.
        ValueError: A step is less than 0.
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        steps: object = self.steps
        if not isinstance(steps, Iterable):
            raise TypeError(f"AtSteps.steps must be a tuple of steps: write AtSteps(({steps!r},))")
        whole = tuple(check_whole("each of AtSteps.steps", step, 0) for step in steps)
        object.__setattr__(self, "steps", whole)  # the class is frozen

    def due(self, moment: Moment) -> bool:
        """Return True if the step is one of `steps`."""
        return moment.step in self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when `seconds` have passed since the last save started.

    Args:
        seconds: Seconds between saves, greater than 0.

    Raises:
        TypeError: `seconds` isn't a number.
        ValueError: `seconds` isn't greater than 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        _check_positive("EverySeconds.seconds", self.seconds)

    def due(self, moment: Moment) -> bool:
        """Return True if `seconds` have passed."""
        return moment.since_save_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Continuous:
    """Save whenever no save is in flight and `min_s` have passed since the last one started.

    Args:
        min_s: Least seconds between the starts of two saves, at least 0.

    Raises:
        TypeError: `min_s` isn't a number.
        ValueError: `min_s` is negative.
    """

    min_s: float = 0.0

    def __post_init__(self) -> None:
        if not check_number("Continuous.min_s", self.min_s) >= 0:
            raise ValueError(f"Continuous.min_s must be at least 0, not {self.min_s}")

    def due(self, moment: Moment) -> bool:
        """Return True if no save is in flight and `min_s` have passed."""
        return not moment.saving and moment.since_save_s >= self.min_s


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Save the agreed stop step after a notice."""

    def due(self, moment: Moment) -> bool:
        """Return True if all ranks stop at this step."""
        return moment.stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Choose the interval with the least cost of saving and of repeating lost steps, by Young's and Daly's estimate.

    The cost of a save is measured. The rate of disruptions is this training's own so far, combined with an assumed rate
    as if `assumed_weight` disruptions had occurred at that rate. The first save, before any measurement, comes after
    `min_s`.

    Raises:
        TypeError: A field isn't a number.
        ValueError: A time or weight isn't greater than 0, the bounds are in the wrong order, or `background_share`
            isn't from 0 to 1.
    """

    min_s: float = 60.0
    """Lower bound of the interval in seconds."""

    max_s: float = 3600.0
    """Upper bound of the interval in seconds."""

    assumed_between_s: float = _DAY_S
    """Assumed mean seconds between disruptions."""

    assumed_weight: float = 1.0
    """Weight of the assumption, as a number of disruptions."""

    background_share: float = 0.05
    """Share of the training's speed that a save in flight costs, from 0 to 1. It is part of the save's cost."""

    def __post_init__(self) -> None:
        for name in ("min_s", "max_s", "assumed_between_s", "assumed_weight"):
            _check_positive(f"Auto.{name}", getattr(self, name))
        if self.min_s > self.max_s:
            raise ValueError(f"Auto.min_s={self.min_s} is greater than Auto.max_s={self.max_s}")
        if not 0 <= check_number("Auto.background_share", self.background_share) <= 1:
            raise ValueError(f"Auto.background_share must be from 0 to 1, not {self.background_share}")

    def due(self, moment: Moment) -> bool:
        """Return True if no save is in flight and the interval has passed."""
        if moment.saving:
            return False
        return moment.since_save_s >= self.interval_s(moment.cost, moment.disruptions)

    def interval_s(self, cost: SaveCost | None, disruptions: Disruptions) -> float:
        """Return the seconds from the start of one save to the start of the next, at least the duration of a save.

        Args:
            cost: The measured cost of a save; None before the first.
            disruptions: The disruptions of this training so far.
        """
        if cost is None:
            return self.min_s
        between_s = (self.assumed_between_s * self.assumed_weight + disruptions.over_s) / (
            self.assumed_weight + disruptions.count
        )
        cost_s = cost.stall_s + self.background_share * cost.duration_s
        best_s = max(_daly_s(cost_s, between_s), cost.duration_s)
        return min(max(best_s, self.min_s), self.max_s)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Save when at least one of `policies` requires it.

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
    """Return the policy of a job's interval."""
    if (every := interval.every) is not None:
        policies: list[SavePolicy] = [] if every.steps is None else [EveryNSteps(every.steps)]
        policies += [] if every.seconds is None else [EverySeconds(every.seconds)]
        return policies[0] if len(policies) == 1 else AnyOf(tuple(policies))
    if interval.continuous is not None:
        return Continuous(interval.continuous.min_seconds or 0)
    asked_s = None if interval.auto is None else interval.auto.max_seconds
    max_s = Auto().max_s if asked_s is None else asked_s
    return Auto(min_s=min(Auto().min_s, max_s), max_s=max_s)


def _daly_s(cost_s: float, between_s: float) -> float:
    """Estimate the interval that costs least, by Daly's higher-order formula, if a save costs `cost_s`.

    If a save costs twice the time between disruptions or more, a shorter interval gains nothing.
    """
    if cost_s >= 2 * between_s:
        return between_s
    half = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(half) / 3 + half / 9)


def _check_positive(name: str, value: float) -> None:
    if not check_number(name, value) > 0:
        raise ValueError(f"{name} must be greater than 0, not {value}")
