"""Judge and classify the ends of attempts (starts of all pods of a job), and limit and delay the restarts."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stepkeeper.contract.exits import Cause, ExitCode
from stepkeeper.contract.termination import Termination

__all__ = [
    "FENCED",
    "JUDGED_KINDS",
    "STOPPED_KINDS",
    "AttemptKind",
    "RestartLimits",
    "Verdict",
    "is_disruption",
    "judge_exit",
]

_MAX_DOUBLINGS: Final = 32

FENCED: Final = "Fenced"
"""The cause of an end because another claim owns the root. A process reports it by its exit code only."""

_FAILURES: Final = frozenset({Cause.APPLICATION_ERROR, Cause.STORAGE_UNAVAILABLE, Cause.HANG})
_DISRUPTIONS: Final = frozenset(Cause) - _FAILURES - {Cause.REQUESTED}
"""Causes that count toward the limit of disruptions: neither the job's own failures nor a request."""


class AttemptKind(StrEnum):
    """The kind of an attempt's end. Later versions may add members."""

    COMPLETED = "Completed"
    """The training is done. No restart follows."""

    FAILED = "Failed"
    """It ended by itself: an error of the application, a hang, or a store that gave no answer."""

    OVER_LIMITS = "OverLimits"
    """A container used more memory or disk than its own limit, or its pod ran until its activeDeadlineSeconds. The
    application alone can have caused that."""

    UNRECOVERABLE = "Unrecoverable"
    """No restart helps: an exit code that the job calls fatal, or a root that another claim owns."""

    DISRUPTED = "Disrupted"
    """The cluster or the cloud ended a pod of it."""

    REQUESTED = "Requested"
    """A person or a program asked its pods to stop, or deleted one."""

    MACHINES_UNAVAILABLE = "MachinesUnavailable"
    """The machines of its QueuedResource were taken away or maintained, which ended its pods."""

    SUSPENDED = "Suspended"
    """Its pods were stopped by the user, by a queue, or for lack of machines, and start again later."""

    STOPPED = "Stopped"
    """It was ended for good: an edit, a deleted JobSet, or a start beyond the job's limits."""

    @classmethod
    def of(cls, cause: str) -> "AttemptKind":
        """Return the kind of an end for `cause`. An unknown cause is a disruption."""
        if cause in _FAILURES:
            return cls.FAILED
        if cause == FENCED:
            return cls.UNRECOVERABLE
        return cls.REQUESTED if cause == Cause.REQUESTED else cls.DISRUPTED


def is_disruption(cause: str) -> bool:
    """Return True if `cause` counts toward the limit of disruptions. No unknown cause does.

    Readers of messages replace an unknown cause. Only a newer operator can have recorded one in a status.
    """
    return cause in _DISRUPTIONS


def judge_exit(code: int | None, message: Termination | None, *, has_committed: bool) -> str:
    """Return the cause that the end of a process shows by itself, unless it ended well.

    `has_committed`: its attempt has. Then a lost peer has more likely lost its machine than failed.
    """
    reported = None if message is None else message.cause
    match code:
        case ExitCode.FENCED:
            return FENCED
        case ExitCode.SAVED:
            return Cause.REQUESTED if reported is None else reported
        case ExitCode.PEER_LOST:
            return Cause.NODE_FAILURE if has_committed else Cause.APPLICATION_ERROR
        case _:
            is_storage = reported == Cause.STORAGE_UNAVAILABLE
            return Cause.STORAGE_UNAVAILABLE if is_storage else Cause.APPLICATION_ERROR


STOPPED_KINDS: Final = frozenset({AttemptKind.SUSPENDED.value, AttemptKind.STOPPED.value})
"""Kinds of attempts that the supervisor or a user ended. The ends of their pods prove nothing."""

JUDGED_KINDS: Final = frozenset(
    {
        AttemptKind.FAILED.value,
        AttemptKind.OVER_LIMITS.value,
        AttemptKind.UNRECOVERABLE.value,
        AttemptKind.DISRUPTED.value,
        AttemptKind.REQUESTED.value,
    }
)
"""Kinds whose cause follows from the pods' ends. Better evidence may correct it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one attempt's end."""

    kind: str
    """An `AttemptKind`."""

    cause: str | None
    """A `Cause`. None: the training is done."""

    message: str
    """The evidence, as text."""

    node: str | None = None
    inferred: bool = False
    """True if the cause is a guess, which any evidence replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limit the restarts of a job by cause, and compute the wait before the next one."""

    max_failures: int = 3
    """Restarts after ApplicationErrors since the last new commit."""

    max_disruptions: int | None = None
    """Restarts after disruptions in the job's whole life. None: no limit."""

    max_starts: int = 10
    """Starts in a row without a new commit."""

    initial_wait_s: int = 10
    max_wait_s: int = 600

    def is_used_up(self, cause: str, *, n_failures: int, n_disruptions: int) -> bool:
        """Return True if no restart is left after an end for `cause`."""
        if cause == Cause.APPLICATION_ERROR:
            return n_failures >= self.max_failures
        limit = self.max_disruptions
        return limit is not None and is_disruption(cause) and n_disruptions >= limit

    def compute_wait_s(self, doublings: int) -> int:
        """Compute the seconds of a wait that was doubled `doublings` times."""
        return int(min(self.max_wait_s, self.initial_wait_s * 2 ** min(doublings, _MAX_DOUBLINGS)))

    def compute_next_start(
        self, cause: str, *, start: float, end: float, n_failures: int, n_starts: int
    ) -> float | None:
        """Compute the earliest time of the next start; None means at once.

        After a failure of the application, or of storage, the wait counts from the end. After all other ends it counts
        from the start, so only attempts that end quickly again and again wait.

        Args:
            cause: A `Cause`.
            start: Unix time at which the attempt began.
            end: Unix time at which it ended.
            n_failures: Restarts after failures so far, since the last new commit.
            n_starts: Starts in a row without a new commit, with this one.
        """
        if cause == Cause.APPLICATION_ERROR:
            due = end + self.compute_wait_s(n_failures)
        elif cause == Cause.STORAGE_UNAVAILABLE:
            due = end + self.compute_wait_s(max(0, n_starts - 1))
        elif n_starts > 1:
            due = start + self.compute_wait_s(n_starts - 2)
        else:
            return None
        return due if due > end else None
