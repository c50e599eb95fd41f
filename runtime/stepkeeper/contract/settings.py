"""settings.json: what the job asks for, mounted into every pod. A start needs this file and storage, nothing else."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from stepkeeper.contract.wire import ContractError, decode_json, encode_json

__all__ = ["Endpoint", "Interval", "IntervalType", "OnDisruption", "Retention", "Settings"]


class IntervalType(StrEnum):
    FIXED = "Fixed"
    """After that many steps, or seconds, whichever is first."""

    CONTINUOUS = "Continuous"
    """Whenever no save is in flight, `seconds` apart at least."""

    AUTO = "Auto"
    """By what a save costs and how often the job is disrupted, `seconds` apart at most."""


class OnDisruption(StrEnum):
    SAVE = "Save"
    """A notice makes all ranks save one step and stop."""

    SKIP = "Skip"
    """A notice makes all ranks stop; the newest commit is what the next attempt resumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    type: IntervalType = IntervalType.FIXED
    steps: int | None = None
    seconds: int | None = None

    def __post_init__(self) -> None:
        if self.type is not IntervalType.FIXED:
            if self.steps is not None:
                raise ContractError(f"interval {self.type} has no steps")
        elif self.steps is None and self.seconds is None:
            raise ContractError("interval needs steps or seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    last: int = 3
    """That many of the newest commits are kept, at least 1."""

    every_steps: int | None = None
    """Commits whose step is a multiple are kept besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    url: str
    """https://…/v1/namespaces/{ns}/jobs/{name}/report"""

    report_interval_s: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    uri: str
    interval: Interval
    retention: Retention = Retention()
    on_disruption: OnDisruption = OnDisruption.SAVE
    total_steps: int | None = None
    endpoint: Endpoint | None = None
    """None: nobody is told; training doesn't need it."""

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        return decode_json(cls, data)

    def to_json(self) -> bytes:
        return encode_json(self)
