"""Define settings.json, by which the job tells every pod what it asks for.

A start needs this file and storage, nothing else.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from stepkeeper.contract.wire import ContractError, Else, decode_message, encode_json, list_unknown

__all__ = [
    "Best",
    "BestMode",
    "Endpoint",
    "Interval",
    "IntervalType",
    "OnDisruption",
    "Retention",
    "Settings",
]


class IntervalType(StrEnum):
    """The kind of an interval between saves."""

    FIXED = "Fixed"
    """Save after that many steps or seconds, whichever is first."""

    CONTINUOUS = "Continuous"
    """Save whenever no save is in flight, at least `seconds` apart."""

    AUTO = "Auto"
    """Save by what a save costs and how often the job is disrupted, at most `seconds` apart."""


class OnDisruption(StrEnum):
    """The reaction to a notice."""

    SAVE = "Save"
    """Save one step on all ranks, and stop them."""

    SKIP = "Skip"
    """Stop all ranks; the next attempt resumes the newest commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The interval between saves."""

    type: IntervalType = IntervalType.FIXED
    steps: int | None = None
    seconds: int | None = None

    def __post_init__(self) -> None:
        if self.type is not IntervalType.FIXED:
            if self.steps is not None:
                raise ContractError(f"interval {self.type} has no steps")
        elif self.steps is None and self.seconds is None:
            raise ContractError("interval needs steps or seconds")


class BestMode(StrEnum):
    """The values of a metric that are best."""

    MIN = "Min"
    """The least, as of a loss."""

    MAX = "Max"
    """The greatest, as of an accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The commits that are best by a metric."""

    metric: str
    mode: BestMode
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The commits that are kept."""

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
class Settings:
    """The settings of a job."""

    uri: str
    """The root of its checkpoints."""

    interval: Annotated[Interval, Else(Interval(type=IntervalType.AUTO))]
    """Auto, if its type isn't known."""

    retention: Annotated[Retention, Else(Retention(every_steps=1))] = Retention()
    """All commits are kept if it isn't known which are best."""

    on_disruption: Annotated[OnDisruption, Else(OnDisruption.SAVE)] = OnDisruption.SAVE
    total_steps: int | None = None
    endpoint: Endpoint | None = None
    """The endpoint for reports. None: nobody is told; training doesn't need it."""

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Decode settings, also those of another version of the operator.

        Raises:
            ContractError: The data is no settings, or of a newer format; the message names what is wrong.

        """
        return decode_message(cls, data)

    @classmethod
    def list_unknown(cls, data: bytes | str) -> tuple[str, ...]:
        """List what in the settings isn't known in this version, and is passed over. Raises ContractError."""
        return list_unknown(cls, data)

    def to_json(self) -> bytes:
        """Encode the settings."""
        return encode_json(self)
