"""Define the history of a job: its attempts, their restarts by cause, and the operator's notes about them.

To open an attempt after another one is a restart, counted for the cause of the other one's end.
"""

from dataclasses import dataclass, replace

from stepkeeper.contract import AttemptKind, Verdict
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    MAX_ATTEMPTS,
    Attempt,
    OperatorState,
    RestartsStatus,
    TrainingJobStatus,
)
from stepkeeper_operator.training_jobs.attempts.budgets import add_restarts

__all__ = ["JobHistory", "describe_end", "verdict_of"]

_MESSAGE_LIMIT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """The part of the status that records the attempts, why they ended and what that cost."""

    attempts: tuple[Attempt, ...]
    restarts: RestartsStatus
    operator: OperatorState
    next_start_time: int | None = None
    """Unix time before which no attempt begins; None without a wait."""

    @property
    def last_attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def is_running(self) -> bool:
        """True while an attempt runs."""
        return self.last_attempt is not None and self.last_attempt.end is None

    @property
    def closed(self) -> tuple[Attempt, ...]:
        """The attempts that have ended."""
        return self.attempts[:-1] if self.is_running else self.attempts

    @property
    def ordinal(self) -> tuple[int, int]:
        """The ordinal of the last attempt of the current JobSet."""
        return (self.operator.job_sets - 1, self.operator.restarts_seen)

    def is_attempt_of(self, status: TrainingJobStatus) -> bool:
        """Return True if the last attempt is also the last one in `status`, so that the status describes it."""
        last, known = self.last_attempt, status.attempts[-1] if status.attempts else None
        if last is None or known is None:
            return False
        return (known.number, known.start) == (last.number, last.start)

    def note(self, **noted: object) -> "JobHistory":
        """Return the history with changes in the operator's state."""
        return replace(self, operator=self.operator.model_copy(update=noted))

    def open(self, *, start: float, template_hash: str | None) -> "JobHistory":
        """Return the history with one more attempt, which starts at `start`, or at the end of the last one if later."""
        last, restarts = self.last_attempt, self.restarts
        if last is not None and last.cause is not None:
            restarts = add_restarts(restarts, last.cause, 1)
        earliest = 0 if last is None or last.end is None else last.end
        attempt = Attempt(number=1 if last is None else last.number + 1, start=max(earliest, int(start)))
        attempts = (*self.attempts, attempt)[-MAX_ATTEMPTS:]
        opened = replace(self, attempts=attempts, restarts=restarts, next_start_time=None)
        n_starts = self.operator.starts_without_checkpoint + 1
        template = {} if template_hash is None else {"started_template": template_hash}
        return opened.note(started=True, starts_without_checkpoint=n_starts, **template)

    def close(self, verdict: Verdict, *, end: int, to_step: int | None, decision: str | None) -> "JobHistory":
        """Return the history with the running attempt closed by `verdict`."""
        observed = {"end": end, "to_step": to_step, "decision": decision}
        closed = self.attempts[-1].model_copy(update=observed | _to_fields(verdict))
        return replace(self, attempts=(*self.attempts[:-1], closed))

    def withdraw(self) -> "JobHistory":
        """Return the history without the running attempt and its restart, because it never fully started."""
        before, restarts = self.attempts[-2] if len(self.attempts) > 1 else None, self.restarts
        if before is not None and before.cause is not None:
            restarts = add_restarts(restarts, before.cause, -1)
        n_starts = max(0, self.operator.starts_without_checkpoint - 1)
        withdrawn = replace(self, attempts=self.attempts[:-1], restarts=restarts)
        return withdrawn.note(starts_without_checkpoint=n_starts)

    def correct(self, attempt: Attempt, verdict: Verdict) -> "JobHistory":
        """Return the history with a new verdict on an ended attempt, and its restart counted for the new cause."""
        corrected = attempt.model_copy(update=_to_fields(verdict))
        history = self.put(attempt, corrected)
        # No restart was counted yet for the end of the last attempt.
        if history.attempts[-1] is corrected or attempt.cause is None or attempt.cause == verdict.cause:
            return history
        restarts = add_restarts(self.restarts, attempt.cause, -1)
        if verdict.cause is not None:
            restarts = add_restarts(restarts, verdict.cause, 1)
        return replace(history, restarts=restarts)

    def put(self, attempt: Attempt, changed: Attempt) -> "JobHistory":
        """Return the history with `changed` in the place of `attempt`."""
        return replace(self, attempts=tuple(changed if each is attempt else each for each in self.attempts))


def describe_end(attempt: Attempt) -> str:
    """Describe the end of an attempt, and its pods' decision whether to save."""
    return "; ".join(filter(None, (attempt.message, attempt.decision)))


def verdict_of(attempt: Attempt) -> Verdict:
    """Return the recorded verdict of an ended attempt."""
    return Verdict(
        kind=attempt.kind or AttemptKind.of(attempt.cause or ""),
        cause=attempt.cause,
        message=attempt.message or "",
        node=attempt.node,
        inferred=bool(attempt.inferred),
    )


def _to_fields(verdict: Verdict) -> dict[str, object]:
    return {
        "kind": verdict.kind,
        "cause": verdict.cause,
        "inferred": verdict.inferred or None,
        "node": verdict.node,
        "message": verdict.message[:_MESSAGE_LIMIT],
    }
