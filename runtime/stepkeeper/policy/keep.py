"""What to keep: frozen values, asked after each commit. Pure, and known to the companion process, which deletes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from stepkeeper.contract import Retention

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
    "from_max_to_keep",
    "from_retention",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What is known of a commit when it is decided whether it stays."""

    slot: int
    step: int
    time_unix_s: float | None = None
    """When it was put, by the store's clock. None: the store doesn't say."""

    metrics: Mapping[str, float] = field(default_factory=dict)


class KeepPolicy(Protocol):
    """Decides which commits stay. What it doesn't keep may still stay for other reasons, as the newest always does."""

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        """Slots of those that stay, of `commits` in the order in which they were committed."""
        ...


@dataclass(frozen=True, slots=True)
class LastN:
    """Keep the `n` newest, in the order of commits, whatever their steps."""

    n: int

    def __post_init__(self) -> None:
        _check_at_least_1("LastN", self.n)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        return frozenset(commit.slot for commit in commits[-self.n :])


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Keep those whose step is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _check_at_least_1("EveryNSteps", self.steps)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        return frozenset(commit.slot for commit in commits if commit.step % self.steps == 0)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Keep the oldest, and then each that came `seconds` or more after the last that is kept, by the store's clock."""

    seconds: int

    def __post_init__(self) -> None:
        _check_at_least_1("EverySeconds", self.seconds)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        found = set()
        last_s: float | None = None
        for commit in commits:
            if commit.time_unix_s is None:
                found.add(commit.slot)
            elif last_s is None or not 0 <= commit.time_unix_s - last_s < self.seconds:
                # A time before the last one's is no time to go by: kept.
                found.add(commit.slot)
                last_s = commit.time_unix_s
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class BestN:
    """Keep the `n` with the best `metric`: the least with mode "min", the greatest with "max". Of equals, the newer.

    The mode has no default: of a loss the least is best, of an accuracy the greatest. A commit without that metric
    stays, unless `keep_without` is False. What is not a number is worse than any number.
    """

    n: int
    metric: str
    mode: str
    keep_without: bool = True

    def __post_init__(self) -> None:
        _check_at_least_1("BestN", self.n)
        if self.mode not in ("min", "max"):
            raise ValueError(f'BestN: mode is "min" or "max", not {self.mode!r}')

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        having = [commit for commit in commits if self.metric in commit.metrics]
        best = sorted(having, key=lambda commit: (*self._badness(commit), -commit.slot))[: self.n]
        without = [commit for commit in commits if self.metric not in commit.metrics]
        return frozenset(commit.slot for commit in (*best, *(without if self.keep_without else ())))

    def _badness(self, commit: Committed) -> tuple[bool, float]:
        value = commit.metrics[self.metric]
        if math.isnan(value):
            return True, 0.0
        return False, value if self.mode == "min" else -value


@dataclass(frozen=True, slots=True)
class MaxAge:
    """Keep those that are at most `seconds` older than the newest, by the store's clock."""

    seconds: int

    def __post_init__(self) -> None:
        _check_at_least_1("MaxAge", self.seconds)

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        newest_s = max((c.time_unix_s for c in commits if c.time_unix_s is not None), default=math.inf)
        return frozenset(
            commit.slot
            for commit in commits
            if commit.time_unix_s is None or newest_s - commit.time_unix_s <= self.seconds
        )


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Keep what one of `policies` keeps."""

    policies: tuple[KeepPolicy, ...]

    def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
        return frozenset[int]().union(*(policy.kept(commits) for policy in self.policies))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A policy as another process can be told it: any of these."""

    last: tuple[LastN, ...] = ()
    steps: tuple[EveryNSteps, ...] = ()
    seconds: tuple[EverySeconds, ...] = ()
    best: tuple[BestN, ...] = ()
    age: tuple[MaxAge, ...] = ()

    @classmethod
    def from_policy(cls, policy: KeepPolicy) -> "Keep":
        """Raises TypeError for a policy that isn't one of this module's: the companion couldn't know it."""
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
                raise TypeError(f"{part!r} is no policy of stepkeeper.policy.keep, which has {known}")
        return cls(**{name: tuple(found) for name, found in parts.items()})  # type: ignore[arg-type]  # sorted by type

    @property
    def policy(self) -> AnyOf:
        """The same as one policy."""
        return AnyOf((*self.last, *self.steps, *self.seconds, *self.best, *self.age))

    @property
    def needs_times(self) -> bool:
        """True if it makes a difference when commits were put."""
        return bool(self.seconds or self.age)


_FIELDS: Final[dict[type, str]] = {
    LastN: "last",
    EveryNSteps: "steps",
    EverySeconds: "seconds",
    BestN: "best",
    MaxAge: "age",
}


def from_retention(retention: Retention) -> KeepPolicy:
    """The policy that a job's settings ask for."""
    last = LastN(max(retention.last, 1))
    if not retention.every_steps:
        return last
    return AnyOf((last, EveryNSteps(retention.every_steps)))


def from_max_to_keep(max_to_keep: int, keep: KeepPolicy | None) -> KeepPolicy | None:
    """`keep`, or so many newest commits; None, where neither is given: all. Raises ValueError where both are."""
    if max_to_keep < 0:
        raise ValueError(f"max_to_keep is at least 0 (all are kept), not {max_to_keep}")
    if max_to_keep and keep is not None:
        raise ValueError("max_to_keep and keep both say what is kept: AnyOf((LastN(n), …)) says it in one")
    return LastN(max_to_keep) if max_to_keep else keep


def _check_at_least_1(what: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{what} takes a number of at least 1, not {value}")
