"""Find the pods and Jobs of one attempt.

Attempts have the same ordinal where JobSet counted no restart between them: after a suspension, and after it replaced a
Job that somebody had deleted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import BatchJob, Pod
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.pod_ends import is_masked, stopped_with_0, was_stopped
from stepkeeper_operator.training_jobs.observed import Observed, View

__all__ = [
    "AttemptPods",
    "find_current_report",
    "find_done",
    "find_ended_pods",
    "find_new_pods",
    "find_pods",
    "is_of_start",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPods:
    """The last known states of the pods and failed Jobs of one attempt."""

    pods: tuple[Pod, ...] = ()
    """With those whose places others took, if one of them failed."""

    present: tuple[Pod, ...] = ()
    """Of each rank, the pod that counts."""

    failed_batch_jobs: tuple[BatchJob, ...] = ()
    ordinal: tuple[int, int] | None = None
    """None: nothing of the attempt was seen."""

    def keep(self, condition: Callable[[Pod], bool]) -> "AttemptPods":
        """Keep only the pods that meet a condition."""
        present = tuple(filter(condition, self.present))
        return replace(self, pods=tuple(filter(condition, self.pods)), present=present)

    def find_start(self, *, now: float) -> float:
        """Return when the first pod was made, or `now` if none was seen."""
        return min([*(pod.created_at for pod in self.pods), now])

    def find_end(self, start: int, *, now: float) -> int:
        """Find when the first pod failed, or else when the last one exited 0: those before it end nothing."""
        failed = [pod.finished_at for pod in self.pods if _has_failed(pod) and pod.finished_at is not None]
        done = [
            pod.finished_at for pod in self.pods if pod.phase == "Succeeded" and pod.finished_at is not None
        ]
        last = max(done) if done and len(done) == len(self.pods) else now
        return max(start, int(min(now, min(failed, default=last))))

    def find_last_step(self, known: int | None) -> int | None:
        """Find the last step that a pod reports as it ends, or that is known before."""
        messages = [pod.termination for pod in self.pods if pod.termination is not None]
        return max(
            (step for step in (known, *(each.step for each in messages)) if step is not None), default=None
        )

    def find_decision(self) -> str | None:
        """Find what the pods chose to save as they stopped."""
        first = sorted(self.pods, key=lambda pod: pod.finished_at or float("inf"))
        messages = [pod.termination for pod in first if pod.termination is not None]
        return next((each.decision for each in messages if each.decision is not None), None)

    def list_masked(self, total_steps: int | None) -> list[Pod]:
        """List the pods that exited 0 and are not done: JobSet takes them for done.

        A training that saved and stopped after its last step is done.
        """
        return [pod for pod in self.present if is_masked(pod) and not _saved_last_step(pod, total_steps)]

    def stopped_with_0(self) -> bool:
        """Return True if a program exited 0 because it was asked to stop, or may have: nobody knows how far it was."""
        return not self.present or any(map(stopped_with_0, self.present))

    def run(self, observed: Observed) -> bool:
        """Return True if one of the pods has not ended yet."""
        own = {pod.uid for pod in self.pods}
        return any(pod.uid in own and not pod.terminal for pod in observed.pods)

    def have_all_started(self, n_hosts: int) -> bool:
        return len({pod.rank for pod in self.pods if pod.started}) >= n_hosts

    def have_failed(self) -> bool:
        """Return True if one of the pods failed by itself."""
        return any(pod.phase == "Failed" and not was_stopped(pod) for pod in self.pods)

    def count_as_failure(self) -> bool | None:
        """Return whether JobSet counts such an end as a failure, by its manifest's rules. None: no end was seen."""
        neutral = ("has condition ", f"exit code {ExitCode.SAVED.value} ")
        if self.failed_batch_jobs:
            return not any(text in self.failed_batch_jobs[0].failure_message for text in neutral)
        if any(pod.disruption or pod.hang or pod.exit_code == ExitCode.SAVED for pod in self.pods):
            return False
        return True if any(pod.phase == "Failed" for pod in self.pods) else None


_NONE = AttemptPods()


def find_pods(history: JobHistory, observed: Observed) -> AttemptPods:
    """Find the pods of the last attempt."""
    evidence, since = observed.find_evidence(history.ordinal), history.operator.resumed_at
    if evidence is None:
        return _NONE
    found = _pick(evidence, evidence.pods, observed, since=since)
    if since is None:
        return found
    return replace(found, failed_batch_jobs=_find_present_failures(evidence, observed))


def find_ended_pods(history: JobHistory, observed: Observed) -> AttemptPods:
    """Find the pods of the newest ended attempt: those of the attempts before and after it prove nothing about it."""
    closed = history.closed
    if not closed:
        return _NONE
    later = find_pods(history, observed)
    if history.operator.started and not history.is_running:
        end = closed[-1].end
        # Pods that were made later were of an attempt that was withdrawn.
        return later.keep(lambda pod: end is None or pod.created_at <= end)
    evidence = observed.find_evidence(_find_ended_ordinal(history, observed))
    if evidence is None:
        return _NONE
    uids = {pod.uid for pod in later.pods}
    own = tuple(pod for pod in evidence.pods if pod.uid not in uids)
    # The time of an end that nobody saw is a guess: nothing is left out by it.
    since = closed[-2].end if len(closed) > 1 and not closed[-2].inferred else None
    found = _pick(evidence, own, observed, since=since)
    # Without any of its pods the Jobs may be another attempt's.
    return found if found.pods or not evidence.pods else _NONE


def _find_ended_ordinal(history: JobHistory, observed: Observed) -> tuple[int, int]:
    number, restarts = history.ordinal
    if history.operator.started and history.operator.resumed_at is not None:
        return number, restarts
    if history.operator.started and restarts > 0:
        return number, restarts - 1
    # It was the last of an earlier JobSet, whose count of restarts isn't known any more.
    return max((e.ordinal for e in observed.evidence if e.ordinal[0] < number), default=(-1, 0))


def _pick(
    evidence: AttemptEvidence, pods: tuple[Pod, ...], observed: Observed, *, since: int | None
) -> AttemptPods:
    """Pick those of the pods that are of the attempt that began at `since`. None: all of them are."""
    own = [pod for pod in pods if since is None or _is_of_attempt(pod, since)]
    present = tuple(_list_present(own, observed))
    uids = {pod.uid for pod in present}
    replaced = tuple(p for p in own if p.uid not in uids and (since is None or p.created_at >= since))
    # The attempt continued with the pods that took the places of those that had exited 0.
    only_done = all(pod.phase == "Succeeded" and not is_masked(pod) for pod in replaced)
    return AttemptPods(
        pods=present if only_done else (*replaced, *present),
        present=present,
        failed_batch_jobs=evidence.failed_batch_jobs,
        ordinal=evidence.ordinal,
    )


def find_current_report(observed: Observed, history: JobHistory) -> LastReport | None:
    """Find the newest report, if it is of the last attempt. After a suspension attempts have the same ordinal."""
    report, last = observed.report, history.last_attempt
    if report is None or last is None or report.ordinal != history.ordinal:
        return None
    return report if is_of_start(report, last, resumed=history.operator.resumed_at is not None) else None


def is_of_start(report: LastReport, attempt: Attempt, *, resumed: bool) -> bool:
    """Return True if a report with the ordinal of the last attempt is of it, and not of one before a suspension.

    Where no other attempt has this ordinal no clock is asked: it may have gone back.
    """
    return not resumed or report.received_at >= attempt.start


def find_done(view: View, history: JobHistory) -> tuple[int, list[Pod]]:
    """Count the pods of the last attempt that are done, and list those that are known.

    A pod is done that exited 0 and meant it: a launcher may exit 0 where the trainer exited with 75. One that was asked
    to stop before is done only if its Job counts it: the Job makes no other pod for it then.
    """
    evidence, total_steps = view.observed.find_evidence(history.ordinal), view.job.spec.total_steps
    if evidence is None:
        return 0, []
    present = _list_present(evidence.pods, view.observed)
    masked = {pod.uid for pod in present if is_masked(pod) and not _saved_last_step(pod, total_steps)}
    done = [p for p in present if p.terminal and p.exit_code == ExitCode.DONE and p.uid not in masked]
    n_succeeded = evidence.n_succeeded - len(masked)
    return max(n_succeeded, sum(pod.deadline is None for pod in done)), done


def find_new_pods(history: JobHistory, observed: Observed) -> int | None:
    """Find pods that run though the last attempt has ended, and that JobSet won't replace.

    Somebody deleted a Job, and JobSet replaced it without counting a restart. Or an operator that has just
    started saw none of the pods that had ended.

    Returns:
        The Unix time from which on pods are of the next attempt; None if there is none.

    """
    evidence, last = observed.find_evidence(history.ordinal), history.last_attempt
    if evidence is None or last is None or last.end is None:
        return None
    if _find_present_failures(evidence, observed):
        return None
    present, uids = _list_present(evidence.pods, observed), {pod.uid for pod in observed.pods}
    alive = [pod for pod in present if _is_alive(pod)]
    done = [pod for pod in present if pod.phase == "Succeeded" and not is_masked(pod)]
    if not alive or len(alive) + len(done) < len(present) or any(pod.uid not in uids for pod in alive):
        return None
    known = {pod.uid for pod in present}
    replaced = {pod.rank for pod in evidence.pods if pod.uid not in known}
    return int(min((pod.created_at for pod in present if pod.rank in replaced), default=last.end))


def _has_failed(pod: Pod) -> bool:
    return pod.phase == "Failed" or (pod.phase == "Succeeded" and is_masked(pod))


def _saved_last_step(pod: Pod, total_steps: int | None) -> bool:
    step = None if pod.termination is None else pod.termination.step
    saved = pod.code == ExitCode.SAVED
    return saved and step is not None and total_steps is not None and step >= total_steps


def _is_of_attempt(pod: Pod, since: int) -> bool:
    """Return True if the pod is of the attempt that began then: it was made later, or ran on without being deleted."""
    if pod.created_at >= since:
        return True
    if pod.terminal and (pod.finished_at is None or int(pod.finished_at) <= since):
        return False
    return pod.deadline is None or pod.deadline - pod.grace_s > since


def _is_alive(pod: Pod) -> bool:
    return not pod.terminal and pod.deadline is None


def _list_present(pods: Iterable[Pod], observed: Observed) -> list[Pod]:
    """List of each rank the pod that counts: the one that lives, else the newest one.

    The clock that dates pods may have gone back between two of them.
    """
    uids = {pod.uid for pod in observed.pods}
    newest: dict[tuple[int, int], Pod] = {}
    for pod in sorted(
        pods, key=lambda pod: (_is_alive(pod) and pod.uid in uids, pod.created_at, _is_alive(pod))
    ):
        newest[pod.rank] = pod
    return list(newest.values())


def _find_present_failures(evidence: AttemptEvidence, observed: Observed) -> tuple[BatchJob, ...]:
    """Find the failed Jobs that JobSet still has to act on: none that it has replaced since."""
    present = _list_present(evidence.pods, observed)
    by_rank = {pod.rank: pod.owner_uid for pod in present}
    replaced = {pod.owner_uid for pod in evidence.pods if by_rank[pod.rank] != pod.owner_uid}
    return tuple(failed for failed in evidence.failed_batch_jobs if failed.uid not in replaced)
