"""Policies that select the commits to keep, as frozen values. They are applied after each commit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from stepkeeper.contract import BestMode, Retention
from stepkeeper.quantities import check_whole

__all__ = [
    "AnyOf",
    "BestN",
    "Committed",
    "EveryNSteps",
    "EverySeconds",
    "Keep",
    "KeepPolicy",
    "LastN",
    "MaxAge",
    "from_retention",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit, as a policy sees it."""

    sequence: int
    """Slot in the log. Later commits have greater numbers, whatever their steps."""

    step: int
    """The training step."""

    time_unix_s: float | None = None
    """Time of its put, in seconds since 1970, by the store's clock. None if the store has no times."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The step's metrics that are numbers."""


class KeepPolicy(Protocol):
    """Select the commits that stay.

    A commit that the policy doesn't select may still stay for other reasons, as the newest commit always does.
    """

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Return the sequence numbers of the commits that stay.

        Args:
            commits: The live commits, in the order in which they were committed.
        """
        ...


@dataclass(frozen=True, slots=True)
class LastN:
    """Keep the `n` newest commits, in the order of commits, whatever their steps.

    Args:
        n: Number of commits, at least 1.

    Raises:
        TypeError: `n` isn't a whole number.
        ValueError: `n` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_whole("LastN.n", self.n, 1)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Return the sequence numbers of the `n` newest commits."""
        return frozenset(commit.sequence for commit in commits[-self.n :])


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Keep the commits whose step is a multiple of `steps`.

    Args:
        steps: Number of steps, at least 1.

    Raises:
        TypeError: `steps` isn't a whole number.
        ValueError: `steps` is less than 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("EveryNSteps.steps", self.steps, 1)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Return the sequence numbers of the commits whose step is a multiple of `steps`."""
        return frozenset(commit.sequence for commit in commits if commit.step % self.steps == 0)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Keep the oldest commit, and each further one that is `seconds` or more later than the last kept one.

    Times are by the store's clock. A commit without a time stays, and so does one with an earlier time than the last
    kept one.

    Args:
        seconds: Seconds between kept commits, at least 1.

    Raises:
        TypeError: `seconds` isn't a whole number.
        ValueError: `seconds` is less than 1.
    """

    seconds: int

    def __post_init__(self) -> None:
        check_whole("EverySeconds.seconds", self.seconds, 1)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Return the sequence numbers of commits that lie at least `seconds` apart."""
        found = set()
        last_s: float | None = None
        for commit in commits:
            if commit.time_unix_s is None:
                found.add(commit.sequence)
            elif last_s is None or not 0 <= commit.time_unix_s - last_s < self.seconds:
                # A time earlier than the last kept commit's can't be trusted: keep the commit.
                found.add(commit.sequence)
                last_s = commit.time_unix_s
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class BestN:
    """Keep the `n` commits with the best `metric`; of equal ones, the newer.

    `mode` has no default, since a low loss but a high accuracy is best. NaN is worse than any number.

    Args:
        n: Number of commits, at least 1.
        metric: Name of the metric.
        mode: "min" if the lowest value is best, "max" if the highest is.
        keep_without: Whether commits without that metric stay.

    Raises:
        TypeError: `n` isn't a whole number.
        ValueError: `n` is less than 1, or `mode` is neither "min" nor "max".
    """

    n: int
    metric: str
    mode: str
    keep_without: bool = True

    def __post_init__(self) -> None:
        check_whole("BestN.n", self.n, 1)
        if self.mode not in ("min", "max"):
            raise ValueError(f'BestN.mode must be "min" or "max", not {self.mode!r}')

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Return the sequence numbers of the best commits, and of those without the metric if they stay."""
        having = [commit for commit in commits if self.metric in commit.metrics]
        best = sorted(having, key=lambda commit: (*self._badness(commit), -commit.sequence))[: self.n]
        without = [commit for commit in commits if self.metric not in commit.metrics]
        return frozenset(commit.sequence for commit in (*best, *(without if self.keep_without else ())))

    def _badness(self, commit: Committed) -> tuple[bool, float]:
        value = commit.metrics[self.metric]
        if math.isnan(value):
            return True, 0.0
        return False, value if self.mode == "min" else -value


@dataclass(frozen=True, slots=True)
class MaxAge:
    """Keep the commits that are at most `seconds` older than the newest, by the store's clock.

    A commit without a time stays.

    Args:
        seconds: Seconds, at least 1.

    Raises:
        TypeError: `seconds` isn't a whole number.
        ValueError: `seconds` is less than 1.
    """

    seconds: int

    def __post_init__(self) -> None:
        check_whole("MaxAge.seconds", self.seconds, 1)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Return the sequence numbers of the commits that are young enough."""
        # Without any time, all commits stay, and the default isn't used.
        newest_s = max((c.time_unix_s for c in commits if c.time_unix_s is not None), default=math.inf)
        return frozenset(
            commit.sequence
            for commit in commits
            if commit.time_unix_s is None or newest_s - commit.time_unix_s <= self.seconds
        )


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Keep the commits that at least one of `policies` keeps.

    Args:
        policies: The policies to combine.
    """

    policies: tuple[KeepPolicy, ...]

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Return the sequence numbers that any of the policies selects."""
        return frozenset[int]().union(*(policy.kept(commits) for policy in self.policies))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A policy in a form that can be sent to the companion, which deletes: its parts, sorted by type."""

    last: tuple[LastN, ...] = ()
    steps: tuple[EveryNSteps, ...] = ()
    seconds: tuple[EverySeconds, ...] = ()
    best: tuple[BestN, ...] = ()
    age: tuple[MaxAge, ...] = ()

    @classmethod
    def from_policy(cls, policy: KeepPolicy) -> "Keep":
        """Sort the parts of `policy` by type. Raises TypeError for a type that the companion doesn't know."""
        parts: dict[str, list[KeepPolicy]] = {name: [] for name in _FIELDS.values()}
        waiting = [policy]
        while waiting:
            part = waiting.pop(0)
            if isinstance(part, AnyOf):
                waiting = [*part.policies, *waiting]
            elif type(part) in _FIELDS:
                parts[_FIELDS[type(part)]].append(part)
            else:
                known = ", ".join(kind.__name__ for kind in (*_FIELDS, AnyOf))
                raise TypeError(
                    f"keep must be a number of commits or a policy of stepkeeper.policy.keep ({known}), not {part!r}"
                )
        return cls(**{name: tuple(found) for name, found in parts.items()})  # type: ignore[arg-type]  # sorted by type

    @property
    def policy(self) -> AnyOf:
        """The same policy as one object."""
        return AnyOf((*self.last, *self.steps, *self.seconds, *self.best, *self.age))

    @property
    def needs_times(self) -> bool:
        """True if a policy needs the times of commits."""
        return bool(self.seconds or self.age)


_FIELDS: Final[dict[type, str]] = {
    LastN: "last",
    EveryNSteps: "steps",
    EverySeconds: "seconds",
    BestN: "best",
    MaxAge: "age",
}


def from_retention(retention: Retention) -> KeepPolicy:
    """Return the policy of a job's settings."""
    last = LastN(max(retention.last, 1))  # the newest commit always stays
    also: list[KeepPolicy] = []
    if retention.every_steps:
        also.append(EveryNSteps(retention.every_steps))
    if (best := retention.best) is not None:
        also.append(BestN(best.count, best.metric, "min" if best.mode is BestMode.MIN else "max"))
    if retention.max_age_seconds:
        also.append(MaxAge(retention.max_age_seconds))
    return AnyOf((last, *also)) if also else last
