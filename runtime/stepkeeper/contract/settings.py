"""Define settings.json, which carries the job's settings to every pod.

A start needs only this file and storage.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from stepkeeper.contract.wire import (
    ContractError,
    Else,
    UnknownMemberError,
    decode_message,
    encode_json,
    list_unknown,
)

__all__ = [
    "AutoInterval",
    "Best",
    "BestMode",
    "ContinuousInterval",
    "Endpoint",
    "EveryInterval",
    "HangLimits",
    "Interval",
    "OnDisruption",
    "Retention",
    "Settings",
]


class OnDisruption(StrEnum):
    """The reaction to a notice."""

    SAVE = "Save"
    """Save one step on all ranks, and stop them."""

    SKIP = "Skip"
    """Stop all ranks; the next attempt resumes the newest commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryInterval:
    """Save every `steps` steps or `seconds` seconds, whichever comes first."""

    steps: int | None = None
    seconds: int | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:  # perhaps a newer operator set a member unknown here
            raise UnknownMemberError("interval.every: give steps, seconds or both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousInterval:
    """Save whenever no save is in flight, at a least distance in seconds."""

    min_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoInterval:
    """Choose the interval by the cost of a save and the rate of disruptions, up to a bound in seconds."""

    max_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The interval between saves. Exactly one field is set."""

    every: EveryInterval | None = None
    continuous: ContinuousInterval | None = None
    auto: AutoInterval | None = None

    def __post_init__(self) -> None:
        n_given = sum(each is not None for each in (self.every, self.continuous, self.auto))
        if n_given != 1:
            # If none is given, a newer operator may have set one that is unknown here.
            error = ContractError if n_given else UnknownMemberError
            raise error("interval: give exactly one of every, continuous and auto")


class BestMode(StrEnum):
    """The direction in which a metric improves."""

    MIN = "Min"
    """The lowest, as of a loss."""

    MAX = "Max"
    """The highest, as of an accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best commits by a metric."""

    metric: str
    mode: BestMode
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rules by which commits are kept."""

    last: int = 3
    """The number of newest commits that are kept, at least 1."""

    every_steps: int | None = None
    """Commits whose step is a multiple of this are kept in addition."""

    best: Best | None = None
    """Commits that are kept in addition."""

    max_age_seconds: int | None = None
    """Commits that are at most this much older than the newest are kept in addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The operator's endpoint for reports."""

    url: str
    """https://…/v1/namespaces/{ns}/jobs/{name}/report"""

    report_interval_s: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """The times after which a training that doesn't move hangs."""

    startup_s: int = 3600
    """Seconds for each part of the start (until steps have been timed), a restore, a call of the manager, and a phase
    that the training marks without a limit of its own."""

    after_s: int | None = None
    """Seconds for a step. None: as long as ten steps, and at least five minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a job."""

    uri: str
    """The root of its checkpoints."""

    interval: Annotated[Interval, Else(Interval(auto=AutoInterval()))]
    """When to save. `Else`, here and below, is the value where a newer operator set only members that this version
    doesn't know: decoding them raises UnknownMemberError."""

    retention: Annotated[Retention, Else(Retention(every_steps=1))] = Retention()
    """Which commits to keep; all, as multiples of 1, if this version doesn't know the mode of `best`."""

    on_disruption: Annotated[OnDisruption, Else(OnDisruption.SAVE)] = OnDisruption.SAVE
    total_steps: int | None = None
    endpoint: Endpoint | None = None
    """The endpoint for reports; None sends no reports. Training doesn't need it."""

    hang: HangLimits | None = None
    """None, as older operators leave it: no hang is reported."""

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode settings, also those of another version of the operator. Raises ContractError."""
        return decode_message(cls, data)

    @classmethod
    def list_unknown(cls, data: bytes | str) -> tuple[str, ...]:
        """List the parts of the settings that this version doesn't know and ignores. Raises ContractError."""
        return list_unknown(cls, data)

    def to_json(self) -> bytes:
        """Encode the settings."""
        return encode_json(self)
