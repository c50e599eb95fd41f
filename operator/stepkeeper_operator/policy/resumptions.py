"""Open the attempt that begins without a restart: a JobSet's first, one after a suspension, one of pods made anew."""

from dataclasses import replace

from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import find_new_pods
from stepkeeper_operator.policy.attempts import open_attempt, was_suspended
from stepkeeper_operator.policy.history import JobHistory

__all__ = ["open_if_started"]


def open_if_started(history: JobHistory, observed: Observed, jobset: JobSet, *, now: float) -> JobHistory:
    """Open an attempt for the first start of a JobSet, or for pods that it made since without counting a restart."""
    if jobset.deleting or jobset.is_finished or jobset.suspend or jobset.suspended:
        return history
    if not history.bookkeeping.started:
        return open_attempt(history, observed, now=now)
    since = _find_resumption(history, observed, jobset, now=now)
    if since is None:
        return history
    resumed = {"resumed_at": since}
    history = replace(history, bookkeeping=history.bookkeeping.model_copy(update=resumed))
    return open_attempt(history, observed, now=now)


def _find_resumption(history: JobHistory, observed: Observed, jobset: JobSet, *, now: float) -> int | None:
    """Find the Unix time since which the pods are of the next attempt. None: none has begun."""
    if _was_resumed(history, jobset) and not _will_be_restarted(history, observed):
        return int(now if jobset.resumed_at is None else jobset.resumed_at)
    return find_new_pods(history, observed)


def _was_resumed(history: JobHistory, jobset: JobSet) -> bool:
    """Tell whether a suspension that the last attempt ended in, or that came after its end, is over."""
    last = history.last_attempt
    if last is None:
        return True  # the attempt before the suspension was withdrawn
    if last.end is None:
        return False
    resumed_since = jobset.resumed_at is not None and jobset.resumed_at > last.end
    return resumed_since or was_suspended(last.message)


def _will_be_restarted(history: JobHistory, observed: Observed) -> bool:
    """Tell whether JobSet still has to act on a failed Job: the next pods are of the next ordinal."""
    evidence = observed.find_evidence(history.ordinal)
    return evidence is not None and bool(evidence.failed_batch_jobs)
