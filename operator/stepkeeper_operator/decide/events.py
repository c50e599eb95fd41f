"""Derive the Kubernetes events that tell a person how the status changed."""

from stepkeeper_operator.api.v1alpha1.conditions import Condition, ConditionStatus, Phase, find_condition
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, TrainingJobStatus
from stepkeeper_operator.decide.conditions import NO_NEW_CHECKPOINT
from stepkeeper_operator.decide.grace import TOO_SHORT
from stepkeeper_operator.decide.progressing import is_stalled
from stepkeeper_operator.decide.running import NO_PODS
from stepkeeper_operator.decide.stuck_pods import is_pod_stuck
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.policy.planning.judgement import TRAINING_DONE

__all__ = ["derive_events"]

_BAD_PHASES = {Phase.FAILED, Phase.RESTARTING}
_BAD_REASONS = {NO_NEW_CHECKPOINT, TRAINING_DONE}


def derive_events(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    """List the events between two statuses.

    There is one for each end of an attempt, start that counts for nothing, corrected cause, resume, change of phase, of
    what a suspended job waits for, refusal, for fields that aren't known, for missing pods, for a training that makes
    no steps, for pods that don't end, and for a grace period that becomes too short or long enough again.
    """
    return (
        *_derive_attempt_events(before, after),
        *_derive_phase_event(before, after),
        *_derive_wait_event(before, after),
        *_derive_accepted_event(before, after),
        *_derive_missing_pods_event(before, after),
        *_derive_stall_event(before, after),
        *_derive_stuck_event(before, after),
        *_derive_request_events(before, after),
        *_derive_grace_event(before, after),
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
            text = f"attempt {attempt.number} ended {how}, not by {earlier.cause}: {attempt.message}"
            events.append(ObjectEvent(warning=False, reason="CauseCorrected", message=text))
        if attempt.from_step is not None and (earlier is None or earlier.from_step is None):
            restored = after.checkpoint.restored if after.checkpoint is not None else None
            commit = "a commit" if restored is None else f"commit {restored.sequence}"
            text = f"attempt {attempt.number} resumed from {commit}, step {attempt.from_step}"
            events.append(ObjectEvent(warning=False, reason="Resumed", message=text))
    return (*events, *_derive_withdrawal_event(before, after))


def _derive_withdrawal_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    """Tell of a start that is no attempt any more."""
    if not before.attempts or before.attempts[-1].end is not None:
        return ()
    number = before.attempts[-1].number
    if any(attempt.number == number for attempt in after.attempts):
        return ()
    quota = find_condition(after.conditions, "QuotaReserved")
    why = "" if quota is None else f": {quota.message}"
    done = after.phase is Phase.COMPLETE
    since = "the training was done before" if done else f"not all of its pods ever ran{why}"
    text = f"start {number} counts for nothing, since {since}"
    return (ObjectEvent(warning=True, reason="StartWithdrawn", message=text),)


def _describe_end(attempt: Attempt) -> ObjectEvent:
    if attempt.cause is None:
        return ObjectEvent(
            warning=False, reason="AttemptEnded", message=f"attempt {attempt.number}: {attempt.message}"
        )
    step = "" if attempt.to_step is None else f" after step {attempt.to_step}"
    text = f"attempt {attempt.number} ended{step} by {attempt.cause}: {attempt.message}"
    return ObjectEvent(warning=True, reason=attempt.cause, message=text)


def _derive_phase_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    if before.phase is after.phase or after.phase is None:
        return ()
    condition = _find_explaining_condition(after)
    why = "" if condition is None else f": {condition.message or condition.reason}"
    text = f"phase {before.phase or 'none'} to {after.phase}{why}"
    bad = after.phase in _BAD_PHASES or (condition is not None and condition.reason in _BAD_REASONS)
    return (ObjectEvent(warning=bad, reason=after.phase.value, message=text),)


def _derive_wait_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    """Tell what a job that stays suspended is suspended for now."""
    earlier, now = (
        find_condition(before.conditions, "Suspended"),
        find_condition(after.conditions, "Suspended"),
    )
    stays = before.phase is after.phase is Phase.SUSPENDED
    if not stays or earlier is None or now is None or earlier.reason == now.reason:
        return ()
    return (ObjectEvent(warning=False, reason=now.reason, message=now.message),)


def _derive_accepted_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    """Warn of what keeps a job from running, and of fields that it runs without."""
    earlier, now = find_condition(before.conditions, "Accepted"), find_condition(after.conditions, "Accepted")
    if now is None or not now.message or (earlier is not None and earlier.message == now.message):
        return ()
    return (ObjectEvent(warning=True, reason=now.reason, message=now.message),)


def _derive_missing_pods_event(
    before: TrainingJobStatus, after: TrainingJobStatus
) -> tuple[ObjectEvent, ...]:
    earlier, now = find_condition(before.conditions, "Running"), find_condition(after.conditions, "Running")
    if now is None or now.reason != NO_PODS or (earlier is not None and earlier.reason == NO_PODS):
        return ()
    return (ObjectEvent(warning=True, reason=NO_PODS, message=now.message),)


def _derive_stall_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    now = find_condition(after.conditions, "Progressing")
    if now is None or not is_stalled(after) or is_stalled(before):
        return ()
    return (ObjectEvent(warning=True, reason=now.reason, message=now.message),)


def _derive_stuck_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    earlier, now = find_condition(before.conditions, "PodStuck"), find_condition(after.conditions, "PodStuck")
    if now is None or not is_pod_stuck(after) or (earlier is not None and earlier.reason == now.reason):
        return ()
    return (ObjectEvent(warning=True, reason="PodStuck", message=now.message),)


def _derive_request_events(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    earlier = None if before.checkpoint is None else before.checkpoint.last_request
    now = None if after.checkpoint is None else after.checkpoint.last_request
    if now is None or now == earlier:
        return ()
    if now.sequence is not None:
        text = f"commit {now.sequence}, step {now.step}, answers the request for a save: {now.reason}"
        return (ObjectEvent(warning=False, reason="SaveRequestAnswered", message=text),)
    text = f"asked the training to save: {now.reason}"
    return (ObjectEvent(warning=False, reason="SaveRequested", message=text),)


def _derive_grace_event(before: TrainingJobStatus, after: TrainingJobStatus) -> tuple[ObjectEvent, ...]:
    earlier, now = (
        find_condition(before.conditions, "GraceSufficient"),
        find_condition(after.conditions, "GraceSufficient"),
    )
    was_short = earlier is not None and earlier.reason == TOO_SHORT
    if now is None or was_short is (now.reason == TOO_SHORT):
        return ()
    return (ObjectEvent(warning=not was_short, reason=now.reason, message=now.message),)


def _find_explaining_condition(status: TrainingJobStatus) -> Condition | None:
    """Find the condition that explains the phase."""
    for kind in ("Failed", "Complete", "Suspended"):
        condition = find_condition(status.conditions, kind)
        if condition is not None and condition.status is ConditionStatus.TRUE:
            return condition
    by_phase = {Phase.SUSPENDING: "Suspended", Phase.QUEUED: "QuotaReserved"}
    return find_condition(status.conditions, by_phase.get(status.phase or Phase.PENDING, "Running"))
