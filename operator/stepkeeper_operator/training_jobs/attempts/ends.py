"""Open an attempt, and close it: by a verdict on its evidence, or because its job or JobSet was stopped."""

from typing import Final

from stepkeeper.contract import AttemptKind, Cause, Verdict
from stepkeeper_operator.api.v1alpha1.trainingjob_status import OperatorState
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.training_jobs.attempts.attempt_pods import AttemptPods, find_new_pods, find_pods
from stepkeeper_operator.training_jobs.attempts.evidence import gather_evidence
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.machines import explain_loss
from stepkeeper_operator.training_jobs.attempts.verdict import judge
from stepkeeper_operator.training_jobs.build.jobset import template_hash
from stepkeeper_operator.training_jobs.observed import View

__all__ = [
    "DELETED",
    "EDITED",
    "NOT_ALLOWED",
    "SUSPENDED",
    "close_as_judged",
    "close_as_stopped",
    "close_by",
    "open_attempt",
    "open_if_started",
    "was_edited",
]

SUSPENDED: Final = "suspended"
EDITED: Final = "spec.template or spec.placement was changed"
DELETED: Final = "its JobSet was deleted"
NOT_ALLOWED: Final = "the job had no restart left"
"""JobSet had begun one more start before the operator saw the last end."""


def open_attempt(history: JobHistory, view: View) -> JobHistory:
    """Add the next attempt, which begins with its first pod, or now if none was observed."""
    start = find_pods(history, view.observed).find_start(now=view.now)
    return history.open(start=start, template_hash=None if view.jobset is None else view.jobset.template_hash)


def close_as_judged(
    history: JobHistory,
    view: View,
    *,
    counted: bool | None,
    rule: str | None = None,
    end: float | None = None,
) -> JobHistory:
    """Close the running attempt by the verdict on its evidence, at `end` at the latest (default: now)."""
    pods = find_pods(history, view.observed)
    evidence = gather_evidence(view, history.attempts[-1], pods, counted=counted, rule=rule)
    return close_by(judge(evidence), history, pods, now=view.now if end is None else end)


def close_as_stopped(
    history: JobHistory, view: View, kind: AttemptKind, message: str, *, cause: Cause = Cause.REQUESTED
) -> JobHistory:
    """Close the running attempt, if there is one, for a reason that its pods do not show."""
    if not history.is_running:
        return history
    verdict = Verdict(kind=kind, cause=cause, message=message)
    return close_by(verdict, history, find_pods(history, view.observed), now=view.now)


def close_by(verdict: Verdict, history: JobHistory, pods: AttemptPods, *, now: float) -> JobHistory:
    """Close the running attempt by this verdict. Its pods show when it ended, and what was saved."""
    attempt = history.attempts[-1]
    return history.close(
        verdict,
        end=pods.find_end(attempt.start, now=now),
        to_step=pods.find_last_step(attempt.to_step),
        decision=pods.find_decision(),
    )


def open_if_started(history: JobHistory, view: View, jobset: JobSet) -> JobHistory:
    """Open an attempt for the first start of a JobSet, or for later pods without a counted restart."""
    if jobset.deleting or jobset.is_finished or jobset.suspend or jobset.suspended:
        return history  # it starts no pods
    if explain_loss(view) is not None:
        return history  # its pods find no machines, and it will be stopped
    if not history.operator.started:
        return open_attempt(history, view)
    since = _find_resumption(history, view, jobset)
    return history if since is None else open_attempt(history.note(resumed_at=since), view)


def _find_resumption(history: JobHistory, view: View, jobset: JobSet) -> int | None:
    """Find the Unix time since which the pods belong to the next attempt; None if it has not begun."""
    evidence, last = view.observed.find_evidence(history.ordinal), history.last_attempt
    # JobSet acts on a failed Job by a restart: then the next pods have the next ordinal.
    restarts = evidence is not None and bool(evidence.failed_batch_jobs)
    if _was_resumed(history, jobset) and not restarts:
        return int(view.now if jobset.resumed_at is None else jobset.resumed_at)
    if last is not None and last.kind == AttemptKind.STOPPED and was_edited(view, history.operator):
        return None  # its JobSet is being replaced: the cache may not show the deletion yet
    return find_new_pods(history, view.observed)


def _was_resumed(history: JobHistory, jobset: JobSet) -> bool:
    """Return True if the suspension that ended the last attempt, or came after its end, is over."""
    last = history.last_attempt
    if last is None:
        return True  # the attempt before the suspension was withdrawn
    if last.end is None:
        return False
    resumed_since = jobset.resumed_at is not None and jobset.resumed_at > last.end
    return resumed_since or last.kind == AttemptKind.SUSPENDED


def was_edited(view: View, operator: OperatorState) -> bool:
    """Return True if template or placement have changed since the newest start, and the edit is accepted.

    False also if that is unknown: without the job's machines, or with fields that only newer operators know.
    """
    started = operator.started_template
    if started is None or not view.observed.accepted or view.job.spec.hides_changes():
        return False
    if view.is_on_queued_resource and view.machines is None:
        return False
    return started != template_hash(view.job, view.machines)
