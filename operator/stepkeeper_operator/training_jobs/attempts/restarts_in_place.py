"""Record the restarts that JobSet did in place: each is an attempt, even if no operator was running."""

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, ConditionType, find_condition
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_pods
from stepkeeper_operator.training_jobs.attempts.ends import close_as_judged, open_attempt
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.machines import explain_loss
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["has_fully_started", "lost_before_full_start", "record_restarts"]


def record_restarts(history: JobHistory, view: View, jobset: JobSet) -> JobHistory:
    """Open an attempt for every restart that JobSet did in place, and close the attempt before it."""
    newest = view.observed.find_evidence(jobset.ordinal)
    has_no_pods = newest is None or not newest.pods
    if history.operator.restarts_seen < jobset.restarts and not history.operator.started:
        history = open_attempt(history, view)  # the attempt before the first restart was not observed
    for counted in _find_counted(history, view, jobset):
        if history.is_running:
            history = _close_restarted(history, view, jobset, counted=counted)
        is_newest = history.operator.restarts_seen + 1 == jobset.restarts
        if is_newest and has_no_pods and (jobset.suspend or jobset.suspended):
            return history  # JobSet creates the pods, and the attempt begins, when it is resumed
        history = open_attempt(_see_restart(history), view)
    # The cache may be older than the JobSet that an earlier reconcile read from the API server: never count back.
    counted_seen = max(history.operator.counted_restarts_seen, jobset.restarts_counted)
    return history.note(counted_restarts_seen=counted_seen)


def _close_restarted(history: JobHistory, view: View, jobset: JobSet, *, counted: bool) -> JobHistory:
    """Close the running attempt at the start of the next; withdraw it if it lost its machines before it started."""
    if lost_before_full_start(history, view):
        return history.withdraw()
    end = find_pods(_see_restart(history), view.observed).find_start(now=view.now)
    return close_as_judged(history, view, counted=counted, rule=jobset.rule, end=end)


def _see_restart(history: JobHistory) -> JobHistory:
    return history.note(restarts_seen=history.operator.restarts_seen + 1, resumed_at=None)


def _find_counted(history: JobHistory, view: View, jobset: JobSet) -> list[bool]:
    """Find for each new restart whether JobSet counted the end before it as an application failure.

    Where pods don't show it, JobSet's counts show how many of these ends were failures, but not which. Assume first the
    ends of attempts with observed pods, and newer before older: evidence of these may still arrive and correct it.
    """
    seen, last = history.operator, history.last_attempt
    if seen.restarts_seen >= jobset.restarts:
        return []
    ordinals = range(seen.restarts_seen + 1, jobset.restarts)
    later = [history.note(restarts_seen=n, resumed_at=None) for n in ordinals]
    pods = [find_pods(each, view.observed) for each in (history, *later)]
    counted = [each.count_as_failure() for each in pods]
    if counted[0] is None and last is not None and not history.is_running:
        counted[0] = last.cause == Cause.APPLICATION_ERROR
    n_unassigned = jobset.restarts_counted - seen.counted_restarts_seen - counted.count(True)
    unobserved = [n for n, each in enumerate(counted) if each is None]
    unobserved.sort(key=lambda n: (not pods[n].pods, -n))
    failed = set(unobserved[: max(0, n_unassigned)])
    return [bool(each) or n in failed for n, each in enumerate(counted)]


def lost_before_full_start(history: JobHistory, view: View) -> bool:
    """Return True if the running attempt's machines are gone, and not all of its pods have ever run on them.

    JobSet may restart the pods before the loss is noticed: the restart then lacks machines.
    """
    return explain_loss(view) is not None and not has_fully_started(history, view)


def has_fully_started(history: JobHistory, view: View) -> bool:
    """Return True if all pods of the running attempt have started, or it has made a step."""
    attempt = history.attempts[-1]
    if attempt.from_step is not None or attempt.to_step is not None:
        return True
    pods = find_pods(history, view.observed)
    if pods.pods:
        return pods.have_all_started(view.n_hosts)
    # A restarted operator has observed none of the pods: the status shows whether they ran.
    running = find_condition(view.job.status.conditions, ConditionType.RUNNING)
    if running is None:
        return False
    return running.status is ConditionStatus.TRUE or running.last_transition_time > attempt.start
