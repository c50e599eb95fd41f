"""Derive the Kubernetes events that report changes of the status."""

from stepkeeper_operator.api.v1alpha1.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    Phase,
    find_condition,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, TrainingJobStatus
from stepkeeper_operator.kinds.decision import ObjectEvent
from stepkeeper_operator.training_jobs.attempts.history import describe_end
from stepkeeper_operator.training_jobs.decide.progressing import is_stalled
from stepkeeper_operator.training_jobs.decide.terminating_pods import is_pod_stuck

__all__ = ["derive_events"]

_BAD_PHASES = {Phase.FAILED, Phase.RESTARTING}
_BAD_REASONS = {Reason.NODES_JOIN_TIMEOUT, Reason.NO_NEW_CHECKPOINT, Reason.TRAINING_DONE}
"""Reasons that make an event a warning. TrainingDone: the job is complete, but not every pod exited 0."""


def derive_events(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    """List the events between two statuses: ends and resumes, phases, notable conditions, and requests to save."""
    return (
        *_derive_attempt_events(before, after),
        *_derive_phase_event(before, after),
        *_derive_condition_events(before, after),
        *_derive_request_events(before, after),
    )


def _derive_attempt_events(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    known = {attempt.number: attempt for attempt in before.attempts}
    events: list[ObjectEvent] = []
    for attempt in after.attempts:
        earlier = known.get(attempt.number)
        if attempt.end is not None and (earlier is None or earlier.end is None):
            events.append(_describe_end(attempt))
        elif earlier is not None and earlier.cause != attempt.cause:
            how = "as done" if attempt.cause is None else f"by {attempt.cause}"
            text = f"attempt {attempt.number} ended {how}, not by {earlier.cause}: {describe_end(attempt)}"
            events.append(ObjectEvent(warning=False, reason="CauseCorrected", message=text))
        if attempt.from_step is not None and (earlier is None or earlier.from_step is None):
            restored = after.checkpoint.restored if after.checkpoint is not None else None
            commit = "a commit" if restored is None else f"commit {restored.sequence}"
            text = f"attempt {attempt.number} resumed from {commit}, step {attempt.from_step}"
            events.append(ObjectEvent(warning=False, reason="Resumed", message=text))
    return (*events, *_derive_withdrawal_event(before, after))


def _derive_withdrawal_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    """Report a start that was withdrawn: the running attempt is no longer in the status."""
    if not before.attempts or before.attempts[-1].end is not None:
        return ()
    number = before.attempts[-1].number
    if any(attempt.number == number for attempt in after.attempts):
        return ()
    quota = find_condition(after.conditions, "QuotaReserved")
    why = "" if quota is None else f": {quota.message}"
    done = after.phase is Phase.COMPLETE
    reason = "the training was already done" if done else f"not all of its pods ever ran{why}"
    text = f"start {number} is not counted: {reason}"
    return (ObjectEvent(warning=True, reason="StartWithdrawn", message=text),)


def _describe_end(attempt: Attempt) -> ObjectEvent:
    if attempt.cause is None:
        text = f"attempt {attempt.number}: {describe_end(attempt)}"
        return ObjectEvent(warning=False, reason="AttemptEnded", message=text)
    step = "" if attempt.to_step is None else f" after step {attempt.to_step}"
    text = f"attempt {attempt.number} ended{step} by {attempt.cause}: {describe_end(attempt)}"
    return ObjectEvent(warning=True, reason=attempt.cause, message=text)


def _derive_phase_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    if before.phase is after.phase or after.phase is None:
        return ()
    condition = _find_explaining_condition(after)
    why = "" if condition is None else f": {condition.message or condition.reason}"
    text = f"phase {before.phase or 'none'} to {after.phase}{why}"
    bad = after.phase in _BAD_PHASES or (condition is not None and condition.reason in _BAD_REASONS)
    return (ObjectEvent(warning=bad, reason=after.phase.value, message=text),)


def _derive_condition_events(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    """Report conditions with a notable change, each by its message."""
    known = {condition.type: condition for condition in before.conditions}
    events = []
    for condition in after.conditions:
        kind, reason, message = condition.type, condition.reason, condition.message
        earlier = known.get(kind)
        changed = earlier is None or earlier.reason != reason
        match kind:
            case ConditionType.SUSPENDED:
                # A change of the phase has an event of its own.
                news = before.phase is after.phase is Phase.SUSPENDED and earlier is not None and changed
            case ConditionType.ACCEPTED:
                news = bool(message) and (earlier is None or earlier.message != message)
            case ConditionType.RUNNING:
                news = changed and reason == Reason.NO_PODS
            case ConditionType.PROGRESSING:
                news = is_stalled(after) and not is_stalled(before)
            case ConditionType.POD_STUCK:
                news = changed and is_pod_stuck(after)
            case ConditionType.GRACE_SUFFICIENT:
                was_short = earlier is not None and earlier.reason == Reason.GRACE_TOO_SHORT
                news = was_short is not (reason == Reason.GRACE_TOO_SHORT)
            case _:
                news = False
        if news:
            quiet = {ConditionType.SUSPENDED, ConditionType.GRACE_SUFFICIENT}
            bad = kind not in quiet or reason in {*_BAD_REASONS, Reason.GRACE_TOO_SHORT}
            # The reason of a stuck pod is only the state of its node.
            title = kind if kind == ConditionType.POD_STUCK else reason
            events.append(ObjectEvent(warning=bad, reason=title, message=message))
    return tuple(events)


def _derive_request_events(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    earlier = None if before.checkpoint is None else before.checkpoint.last_request
    request = None if after.checkpoint is None else after.checkpoint.last_request
    if request is None or request == earlier:
        return ()
    reason, text = "SaveRequested", f"asked the training to save: {request.reason}"
    if request.sequence is not None:
        reason = "SaveRequestAnswered"
        text = (
            f"commit {request.sequence} at step {request.step} fulfills the request to save: {request.reason}"
        )
    return (ObjectEvent(warning=False, reason=reason, message=text),)


def _find_explaining_condition(status: TrainingJobStatus) -> Condition | None:
    """Find the condition that explains the phase."""
    for kind in ("Failed", "Complete", "Suspended"):
        condition = find_condition(status.conditions, kind)
        if condition is not None and condition.status is ConditionStatus.TRUE:
            return condition
    by_phase = {Phase.SUSPENDING: "Suspended", Phase.QUEUED: "QuotaReserved"}
    return find_condition(status.conditions, by_phase.get(status.phase or Phase.PENDING, "Running"))
