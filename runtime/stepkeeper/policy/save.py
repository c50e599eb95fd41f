"""When to save: frozen values, asked after each step. Clocks and counts come in as arguments."""

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
    """What the saves of this process took so far."""

    stall_s: float
    """That the train thread waited for one."""

    duration_s: float
    """From the call to the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruptions:
    """How often this training was ended from outside, as far as it is known."""

    count: int = 0
    over_s: float = 0.0
    """In how long a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A finished step, and what is known then. The defaults are what every rank knows without asking the others."""

    step: int
    stopping: bool = False
    """All ranks agreed to stop at this step, and it isn't being saved yet."""

    since_save_s: float = 0.0
    """Since the last save began, or the training did."""

    saving: bool = True
    """A save is in flight."""

    cost: SaveCost | None = None
    """None: nothing was saved yet."""

    disruptions: Disruptions = Disruptions()


class SavePolicy(Protocol):
    """Decides whether the step that was just finished is to be saved."""

    def due(self, moment: Moment) -> bool:
        """True if this step is to be saved."""
        ...


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Save the steps that are multiples of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a save interval has at least 1 step, not {self.steps}")

    def due(self, moment: Moment) -> bool:
        return moment.step % self.steps == 0


@dataclass(frozen=True, slots=True)
class AtSteps:
    """Save these steps: the last one of a training, whose result is what it was run for, or any others."""

    steps: tuple[int, ...]

    def due(self, moment: Moment) -> bool:
        return moment.step in self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when `seconds` have passed since the last save began."""

    seconds: float

    def __post_init__(self) -> None:
        _check_positive("a save interval", self.seconds)

    def due(self, moment: Moment) -> bool:
        return moment.since_save_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Continuous:
    """Save whenever no save is in flight, and `minimum_s` have passed since the last one began."""

    minimum_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.minimum_s >= 0:
            raise ValueError(f"the least time between saves is 0 s or longer, not {self.minimum_s}")

    def due(self, moment: Moment) -> bool:
        return not moment.saving and moment.since_save_s >= self.minimum_s


@dataclass(frozen=True, slots=True)
class OnPreemption:
    """Save the step that all ranks agreed to stop at, after a notice."""

    def due(self, moment: Moment) -> bool:
        return moment.stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Save so often that saving and repeating lost steps cost least together, by Young's and Daly's estimate.

    What a save costs is measured. How often the training is disrupted is what is known of this one, weighed with an
    assumption as if `assumed_weight` disruptions had been seen at the assumed rate. Before the first save nothing is
    measured: it comes after `least_s`.
    """

    least_s: float = 60.0
    most_s: float = 3600.0
    """Bounds of the interval, whatever is measured."""

    assumed_between_s: float = _DAY_S
    """Mean time between disruptions, where nothing else is known."""

    assumed_weight: float = 1.0
    background_share: float = 0.05
    """What a save in flight takes of the training's speed, as a share: part of its cost."""

    def __post_init__(self) -> None:
        for name in ("least_s", "most_s", "assumed_between_s", "assumed_weight"):
            _check_positive(f"Auto's {name}", getattr(self, name))
        if self.least_s > self.most_s:
            raise ValueError(f"Auto's least_s={self.least_s} is more than its most_s={self.most_s}")
        if not 0 <= self.background_share <= 1:
            raise ValueError(f"Auto's background_share is from 0 to 1, not {self.background_share}")

    def due(self, moment: Moment) -> bool:
        if moment.saving:
            return False
        return moment.since_save_s >= self.interval_s(moment.cost, moment.disruptions)

    def interval_s(self, cost: SaveCost | None, disruptions: Disruptions) -> float:
        """From the begin of one save to the next one's; never shorter than a save takes."""
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
    """Save when one of `policies` says so."""

    policies: tuple[SavePolicy, ...]

    def due(self, moment: Moment) -> bool:
        return any(policy.due(moment) for policy in self.policies)


def parts_of(policy: SavePolicy) -> Iterator[SavePolicy]:
    """`policy`, or all that it combines."""
    if isinstance(policy, AnyOf):
        for part in policy.policies:
            yield from parts_of(part)
    else:
        yield policy


def from_interval(interval: Interval, *, total_steps: int | None = None) -> SavePolicy:
    """The policy that a job's settings ask for; the last of `total_steps` is saved whatever the interval."""
    policies = _of_type(interval)
    if total_steps is not None:
        policies.append(AtSteps((total_steps,)))
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
    """The interval that costs least, where a save costs `cost_s` and disruptions come `between_s` apart in the mean.

    Daly's higher-order estimate. Where a save costs as much as two such times, nothing is gained by saving sooner.
    """
    if cost_s >= 2 * between_s:
        return between_s
    half = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(half) / 3 + half / 9)


def _check_positive(what: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{what} is longer than 0 s, not {value}")
