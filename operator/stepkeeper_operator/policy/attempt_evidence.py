"""Find the evidence of one attempt. Attempts have the same labels where JobSet counted no restart between them.

That is so after a suspension, and after JobSet made a Job anew that somebody had deleted.
"""

from collections.abc import Iterable
from dataclasses import replace

from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, Bookkeeping
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import BatchJob, Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.pod_ends import is_masked

__all__ = [
    "counts_as_failure",
    "find_attempt_evidence",
    "find_current_report",
    "find_done",
    "find_last_evidence",
    "find_masked",
    "find_new_pods",
    "find_start",
    "is_of_attempt",
    "is_of_start",
    "leave_out_replaced",
    "runs_down",
]


def find_attempt_evidence(history: JobHistory, observed: Observed) -> AttemptEvidence | None:
    """Find the evidence of the last attempt."""
    since = history.bookkeeping.resumed_at
    evidence = observed.find_evidence(history.ordinal)
    if evidence is None:
        return None
    if since is None:
        return replace(evidence, pods=_leave_out_passed(evidence.pods, observed))
    return AttemptEvidence(
        ordinal=evidence.ordinal,
        pods=tuple(pod for pod in leave_out_replaced(evidence.pods, observed) if is_of_attempt(pod, since)),
        failed_batch_jobs=_find_present_failures(evidence, observed),
    )


def find_last_evidence(history: JobHistory, observed: Observed) -> AttemptEvidence | None:
    """Find the evidence of the last attempt without the pods whose places others took: they completed nothing."""
    evidence = find_attempt_evidence(history, observed)
    return (
        None
        if evidence is None
        else replace(evidence, pods=tuple(leave_out_replaced(evidence.pods, observed)))
    )


def find_masked(history: JobHistory, observed: Observed, total_steps: int | None) -> list[Pod]:
    """Find the pods of the last attempt that exited 0 and are not done: JobSet takes them for done.

    A training that saved and stopped after its last step is done.
    """
    evidence = find_last_evidence(history, observed)
    masked = [pod for pod in evidence.pods if is_masked(pod)] if evidence is not None else []
    return [pod for pod in masked if not _saved_last_step(pod, total_steps)]


def _saved_last_step(pod: Pod, total_steps: int | None) -> bool:
    step = None if pod.termination is None else pod.termination.step
    saved = pod.code == ExitCode.SAVED
    return saved and step is not None and total_steps is not None and step >= total_steps


def find_current_report(observed: Observed, history: JobHistory) -> LastReport | None:
    """Find the newest report, if it is of the last attempt. After a suspension attempts have the same ordinal."""
    report, last = observed.report, history.last_attempt
    if report is None or last is None or report.ordinal != history.ordinal:
        return None
    return report if is_of_start(report, last, history.bookkeeping) else None


def is_of_start(report: LastReport, attempt: Attempt, bookkeeping: Bookkeeping) -> bool:
    """Tell whether a report with the ordinal of the last attempt is of it, and not of one before a suspension.

    Where no other attempt has this ordinal no clock is asked: it may have gone back.
    """
    return bookkeeping.resumed_at is None or report.received_at >= attempt.start


def find_done(observed: Observed, history: JobHistory) -> tuple[int, list[Pod]]:
    """Count the pods of the last attempt that are done, and list those that are known.

    A pod is done that exited 0 and meant it: a launcher may say 0 where the trainer said 75. One that was told to stop
    before is done only if its Job says so: it makes no other pod for it then.
    """
    evidence = observed.find_evidence(history.ordinal)
    if evidence is None:
        return 0, []
    present = leave_out_replaced(evidence.pods, observed)
    done = [pod for pod in present if pod.terminal and pod.exit_code == pod.code == ExitCode.DONE]
    n_succeeded = evidence.n_succeeded - sum(map(is_masked, present))
    return max(n_succeeded, sum(pod.deadline is None for pod in done)), done


def find_start(history: JobHistory, observed: Observed, *, now: float) -> float:
    """Return when the first pod of the attempt was made, or `now` if none was seen."""
    evidence = find_attempt_evidence(history, observed)
    created = [pod.created_at for pod in evidence.pods] if evidence is not None else []
    return min([*created, now])


def find_new_pods(history: JobHistory, observed: Observed) -> int | None:
    """Find pods that run though the last attempt has ended, and that JobSet won't replace.

    Somebody deleted a Job, and JobSet made it anew without counting a restart. Or an operator that has just
    started saw none of the pods that had ended.

    Returns:
        The Unix time from which on pods are of the next attempt; None if there is none.

    """
    evidence, last = observed.find_evidence(history.ordinal), history.last_attempt
    if evidence is None or last is None or last.end is None or _find_present_failures(evidence, observed):
        return None
    present = leave_out_replaced(evidence.pods, observed)
    uids = {pod.uid for pod in observed.pods}
    if not any(map(_is_alive, present)) or not all(map(_goes_on, present)):
        return None
    if any(_is_alive(pod) and pod.uid not in uids for pod in present):
        return None
    replaced = {pod.rank for pod in evidence.pods if pod not in present}
    made = [pod.created_at for pod in present if pod.rank in replaced]
    return int(min(made, default=last.end))


def runs_down(history: JobHistory, observed: Observed) -> bool:
    """Tell whether a pod of the last attempt has not ended yet."""
    evidence = find_attempt_evidence(history, observed)
    own = set() if evidence is None else {pod.uid for pod in evidence.pods}
    return any(pod.uid in own and not pod.terminal for pod in observed.pods)


def counts_as_failure(evidence: AttemptEvidence | None) -> bool | None:
    """Tell whether JobSet counts such an end as a failure, by the rules of its manifest. None: no end was seen."""
    if evidence is None:
        return None
    neutral = ("has condition ", f"exit code {ExitCode.SAVED.value} ")
    if evidence.failed_batch_jobs:
        return not any(text in evidence.failed_batch_jobs[0].failure_message for text in neutral)
    if any(pod.disruption or pod.hang or pod.exit_code == ExitCode.SAVED for pod in evidence.pods):
        return False
    return True if any(pod.phase == "Failed" for pod in evidence.pods) else None


def is_of_attempt(pod: Pod, since: int) -> bool:
    """Tell whether the pod is of the attempt that began then: it was made later, or ran on without being deleted."""
    if pod.created_at >= since:
        return True
    if pod.terminal and (pod.finished_at is None or pod.finished_at < since):
        return False
    return pod.deadline is None or pod.deadline - pod.grace_s > since


def _goes_on(pod: Pod) -> bool:
    """Tell whether the pod runs, or has exited 0 and leaves the others to run."""
    return _is_alive(pod) or (pod.phase == "Succeeded" and not is_masked(pod))


def _is_alive(pod: Pod) -> bool:
    return not pod.terminal and pod.deadline is None


def leave_out_replaced(pods: Iterable[Pod], observed: Observed) -> list[Pod]:
    """Leave out each pod whose place another took: of each rank, the one that lives counts, else the newest one.

    The clock that dates pods may have gone back between two of them.
    """
    uids = {pod.uid for pod in observed.pods}
    newest: dict[tuple[int, int], Pod] = {}
    for pod in sorted(
        pods, key=lambda pod: (_is_alive(pod) and pod.uid in uids, pod.created_at, _is_alive(pod))
    ):
        newest[pod.rank] = pod
    return list(newest.values())


def _leave_out_passed(pods: tuple[Pod, ...], observed: Observed) -> tuple[Pod, ...]:
    """Leave out the pods whose places others took, if none of them failed: the attempt went on with those others."""
    present = leave_out_replaced(pods, observed)
    replaced = [pod for pod in pods if pod not in present]
    return (
        tuple(present) if all(pod.phase == "Succeeded" and not is_masked(pod) for pod in replaced) else pods
    )


def _find_present_failures(evidence: AttemptEvidence, observed: Observed) -> tuple[BatchJob, ...]:
    """Find the failed Jobs that JobSet still has to act on: none that it has made anew since."""
    present = leave_out_replaced(evidence.pods, observed)
    by_rank = {pod.rank: pod.owner_uid for pod in present}
    replaced = {pod.owner_uid for pod in evidence.pods if by_rank[pod.rank] != pod.owner_uid}
    return tuple(failed for failed in evidence.failed_batch_jobs if failed.uid not in replaced)
