"""Classify the ends of attempts, and limit and space the restarts after them: one set of rules for every supervisor."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stepkeeper.contract.exits import Cause

__all__ = [
    "FENCED",
    "JUDGED_KINDS",
    "STOPPED_KINDS",
    "AttemptKind",
    "RestartLimits",
    "Verdict",
    "is_disruption",
]

_MAX_DOUBLINGS: Final = 32

FENCED: Final = "Fenced"
"""The cause of an end because another claim owns the root of the checkpoints. No process reports it but by its code."""

_FAILURES: Final = frozenset({Cause.APPLICATION_ERROR, Cause.STORAGE_UNAVAILABLE, Cause.HANG})
_DISRUPTIONS: Final = frozenset(Cause) - _FAILURES - {Cause.REQUESTED}


class AttemptKind(StrEnum):
    """The kind of an attempt's end: what it proves, and what may follow. There may be more."""

    COMPLETED = "Completed"
    """The training is done. Nothing follows."""

    FAILED = "Failed"
    """It ended by itself: an error of the application, a hang, or a store that gave no answer."""

    OVER_LIMITS = "OverLimits"
    """A container used more memory or disk than its own limit. The application alone can have caused that."""

    UNRECOVERABLE = "Unrecoverable"
    """No restart helps: an exit code that the job calls fatal, or a root that another claim owns."""

    DISRUPTED = "Disrupted"
    """The cluster or the cloud ended a pod of it."""

    REQUESTED = "Requested"
    """A person or a program asked its pods to stop, or deleted one."""

    MACHINES_UNAVAILABLE = "MachinesUnavailable"
    """The machines of its QueuedResource were taken away, or had maintenance. The ends of its pods follow from that."""

    SUSPENDED = "Suspended"
    """Its pods were stopped to start again later: by the user, by a queue, or because it had no machines."""

    STOPPED = "Stopped"
    """It was ended for good: an edit, a deleted JobSet, or a start beyond the job's limits."""

    @classmethod
    def of(cls, cause: str) -> "AttemptKind":
        """Return the kind of an end for `cause`. A cause that isn't known is a disruption."""
        if cause in _FAILURES:
            return cls.FAILED
        if cause == FENCED:
            return cls.UNRECOVERABLE
        return cls.REQUESTED if cause == Cause.REQUESTED else cls.DISRUPTED


def is_disruption(cause: str) -> bool:
    """Return True for a cause that counts towards the limit of disruptions. One that isn't known ends no job."""
    return cause in _DISRUPTIONS


STOPPED_KINDS: Final = frozenset({AttemptKind.SUSPENDED.value, AttemptKind.STOPPED.value})
"""The supervisor itself, or a person, ended the attempt: the ends of its pods prove nothing."""

JUDGED_KINDS: Final = frozenset(
    {
        AttemptKind.FAILED.value,
        AttemptKind.OVER_LIMITS.value,
        AttemptKind.UNRECOVERABLE.value,
        AttemptKind.DISRUPTED.value,
        AttemptKind.REQUESTED.value,
    }
)
"""The pods' ends decided the cause, and better evidence may correct it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one attempt's end."""

    kind: str
    """An `AttemptKind`."""

    cause: str | None
    """A `Cause`. None: the training is done."""

    message: str
    """The evidence, for people."""

    node: str | None = None
    inferred: bool = False
    """True if nothing that was seen proves the cause: any evidence replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limit the restarts of a job by cause, and compute the wait before the next one."""

    max_failures: int
    """Restarts after ApplicationErrors since the last new commit."""

    max_disruptions: int | None
    """Restarts after disruptions in the job's whole life. None: no limit."""

    initial_wait_s: int
    max_wait_s: int

    def is_used_up(self, cause: str, *, n_failures: int, n_disruptions: int) -> bool:
        """Return True if an attempt that ended for `cause` may not be restarted after so many earlier restarts."""
        if cause == Cause.APPLICATION_ERROR:
            return n_failures >= self.max_failures
        limit = self.max_disruptions
        return limit is not None and is_disruption(cause) and n_disruptions >= limit

    def compute_wait_s(self, doublings: int) -> int:
        """Compute the seconds of a wait that has been doubled so often."""
        return int(min(self.max_wait_s, self.initial_wait_s * 2 ** min(doublings, _MAX_DOUBLINGS)))

    def compute_next_start(
        self, cause: str, *, start: float, end: float, n_failures: int, n_starts: int
    ) -> float | None:
        """Compute the earliest time of the start after an attempt that ended for `cause`. None: at once.

        After a failure of the application the wait counts from the failure. It does so too while storage is away, which
        an attempt has already waited for. After all other ends it counts from the start: only starts that end at once,
        again and again, wait.

        Args:
            cause: A `Cause`.
            start: Unix time at which the attempt began.
            end: Unix time at which it ended.
            n_failures: Restarts after failures so far, since the last new commit.
            n_starts: Starts in a row without a new commit, with this one.

        """
        if cause in {Cause.APPLICATION_ERROR, Cause.STORAGE_UNAVAILABLE}:
            doublings = n_failures if cause == Cause.APPLICATION_ERROR else max(0, n_starts - 1)
            due = end + self.compute_wait_s(doublings)
        else:
            due = start + self.compute_wait_s(n_starts - 2) if n_starts > 1 else 0.0
        return due if due > end else None
