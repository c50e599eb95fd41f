"""Events: what a person wants to be told of the way from one status to the next."""

from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    Condition,
    ConditionStatus,
    Phase,
    TrainingJobStatus,
)
from stepkeeper_operator.decide.conditions import NO_PODS
from stepkeeper_operator.decision import Note

__all__ = ["narrate"]

_BAD_PHASES = {Phase.FAILED, Phase.RESTARTING}


def narrate(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[Note, ...]:
    """One note for each end of an attempt, change of its cause, resume, change of phase, and for missing pods."""
    return (
        *_attempts(before, after),
        *_phase(before, after),
        *_refusal(before, after),
        *_missing_pods(before, after),
    )


def _attempts(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[Note, ...]:
    known = {attempt.number: attempt for attempt in before.attempts}
    notes: list[Note] = []
    for attempt in after.attempts:
        earlier = known.get(attempt.number)
        if attempt.end is not None and (earlier is None or earlier.end is None):
            notes.append(_ended(attempt))
        elif earlier is not None and earlier.cause != attempt.cause:
            text = (
                f"attempt {attempt.number} ended by {attempt.cause}, not {earlier.cause}: {attempt.message}"
            )
            notes.append(Note(warning=False, reason="CauseCorrected", message=text))
        if attempt.from_step is not None and (earlier is None or earlier.from_step is None):
            restored = after.checkpoint.restored if after.checkpoint is not None else None
            commit = "a commit" if restored is None else f"commit {restored.sequence}"
            text = f"attempt {attempt.number} resumed from {commit}, step {attempt.from_step}"
            notes.append(Note(warning=False, reason="Resumed", message=text))
    return tuple(notes)


def _ended(attempt: Attempt) -> Note:
    if attempt.cause is None:
        return Note(
            warning=False, reason="AttemptEnded", message=f"attempt {attempt.number}: {attempt.message}"
        )
    step = "" if attempt.to_step is None else f" after step {attempt.to_step}"
    text = f"attempt {attempt.number} ended{step} by {attempt.cause}: {attempt.message}"
    return Note(warning=True, reason=attempt.cause, message=text)


def _phase(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[Note, ...]:
    if before.phase is after.phase or after.phase is None:
        return ()
    condition = _telling(after)
    said = "" if condition is None else f": {condition.message or condition.reason}"
    text = f"phase {before.phase or 'none'} to {after.phase}{said}"
    return (Note(warning=after.phase in _BAD_PHASES, reason=after.phase.value, message=text),)


def _refusal(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[Note, ...]:
    earlier, now = _named(before, "Accepted"), _named(after, "Accepted")
    if (
        now is None
        or now.status is ConditionStatus.TRUE
        or (earlier is not None and earlier.message == now.message)
    ):
        return ()
    return (Note(warning=True, reason=now.reason, message=now.message),)


def _missing_pods(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[Note, ...]:
    earlier, now = _named(before, "Running"), _named(after, "Running")
    if now is None or now.reason != NO_PODS or (earlier is not None and earlier.reason == NO_PODS):
        return ()
    return (Note(warning=True, reason=NO_PODS, message=now.message),)


def _telling(status: TrainingJobStatus) -> Condition | None:
    for kind in ("Failed", "Complete", "Suspended"):
        condition = _named(status, kind)
        if condition is not None and condition.status is ConditionStatus.TRUE:
            return condition
    return _named(status, "Running")


def _named(status: TrainingJobStatus, kind: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)
