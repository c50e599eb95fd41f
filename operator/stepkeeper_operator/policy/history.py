"""Define the history of a job, and what is found out about an attempt's end."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    Bookkeeping,
    RestartsStatus,
    TrainingJobStatus,
)

__all__ = ["CAUSE_DISRUPTION", "CAUSE_FENCED", "NO_CAUSE", "Finding", "JobHistory", "Verdict"]

CAUSE_FENCED: Final = "Fenced"
CAUSE_DISRUPTION: Final = Cause.DISRUPTION.value
NO_CAUSE: Final = ""
"""The training is done: the end needs no cause, and has no restart."""


class Verdict(Enum):
    """The consequence of an end for the job."""

    RESTART = "restart"
    FENCED = "fenced"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The cause of an attempt's end, as far as it is known."""

    cause: str
    message: str
    node: str | None = None
    verdict: Verdict = Verdict.RESTART
    explained: bool = True
    """False: the cause is a guess, and any evidence replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """The part of the status that tells which attempts ran, why they ended and what that cost."""

    attempts: tuple[Attempt, ...]
    restarts: RestartsStatus
    bookkeeping: Bookkeeping
    finding: Finding | None = None
    """The finding about the newest ended attempt. None: nothing was looked for since the status was read."""

    @property
    def last_attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def is_running(self) -> bool:
        """True while an attempt runs."""
        return self.last_attempt is not None and self.last_attempt.end is None

    def is_attempt_of(self, status: TrainingJobStatus) -> bool:
        """Return True if the last attempt is also the last one in `status`: all else there is about it, too."""
        last, known = self.last_attempt, status.attempts[-1] if status.attempts else None
        if last is None or known is None:
            return False
        return (known.number, known.start) == (last.number, last.start)

    @property
    def ordinal(self) -> tuple[int, int]:
        """The ordinal of the last attempt of the current JobSet."""
        return (self.bookkeeping.job_sets - 1, self.bookkeeping.restarts_seen)
