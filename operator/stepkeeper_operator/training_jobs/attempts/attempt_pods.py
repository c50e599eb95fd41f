"""Find the pods and Jobs of one attempt.

Attempts share an ordinal if JobSet counted no restart between them: after a suspension, and after it replaced a
deleted Job. `operator.resumed_at` is the time at which the last of them began; None if only one has the ordinal. The
present pod of a rank is its live one, else its newest. An exit code is hidden if the pod exited 0 although its training
reported another code.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts.jobset import BatchJob
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.pod_ends import (
    exit_code_was_hidden,
    stopped_with_0,
    was_stopped,
)
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
    """All pods of the attempt, including replaced ones if one of those failed."""

    present: tuple[Pod, ...] = ()
    """The present pod of each rank."""

    failed_batch_jobs: tuple[BatchJob, ...] = ()
    ordinal: tuple[int, int] | None = None
    """None if no object of the attempt was observed."""

    def keep(self, condition: Callable[[Pod], bool]) -> "AttemptPods":
        """Keep only the pods that satisfy `condition`."""
        present = tuple(filter(condition, self.present))
        return replace(self, pods=tuple(filter(condition, self.pods)), present=present)

    def find_start(self, *, now: float) -> float:
        """Return when the first pod was created, or `now` if none was observed."""
        return min([*(pod.created_at for pod in self.pods), now])

    def find_end(self, start: int, *, now: float) -> int:
        """Find when the first pod failed, or else when all had exited 0. Clocks differ: stay in `start` to `now`."""
        failed = [pod.finished_at for pod in self.pods if _has_failed(pod) and pod.finished_at is not None]
        done = [p.finished_at for p in self.pods if p.phase == "Succeeded" and p.finished_at is not None]
        all_done_at = max(done) if done and len(done) == len(self.pods) else now
        return max(start, int(min(now, min(failed, default=all_done_at))))

    def find_last_step(self, known: int | None) -> int | None:
        """Find the last step of the pods' termination messages and the `known` one."""
        steps = [known, *(pod.termination.step for pod in self.pods if pod.termination is not None)]
        return max((step for step in steps if step is not None), default=None)

    def find_decision(self) -> str | None:
        """Find the pods' decision whether to save before they stopped."""
        first = sorted(self.pods, key=lambda pod: pod.finished_at or float("inf"))
        messages = [pod.termination for pod in first if pod.termination is not None]
        return next((each.decision for each in messages if each.decision is not None), None)

    def list_hidden_exits(self, total_steps: int | None) -> list[Pod]:
        """List the pods with hidden exit codes that are not done, though JobSet counts them as done."""
        return [pod for pod in self.present if _has_hidden_exit(pod, total_steps)]

    def stopped_with_0(self) -> bool:
        """Return True if a program exited 0 because it was asked to stop, or may have: its progress is unknown."""
        return not self.present or any(map(stopped_with_0, self.present))

    def has_running_pods(self, observed: Observed) -> bool:
        """Return True if one of the pods has not ended yet."""
        uids = {pod.uid for pod in self.pods}
        return any(pod.uid in uids and not pod.terminal for pod in observed.pods)

    def have_all_started(self, n_hosts: int) -> bool:
        return len({pod.rank for pod in self.pods if pod.started}) >= n_hosts

    def have_failed(self) -> bool:
        """Return True if one of the pods failed by itself."""
        return any(pod.phase == "Failed" and not was_stopped(pod) for pod in self.pods)

    def count_as_failure(self) -> bool | None:
        """Return whether JobSet counts the end as a failure by its rules; None if no end was observed."""
        if self.failed_batch_jobs:
            # The message names what the rule matched: these two count as no failure.
            neutral = ("has condition ", f"exit code {ExitCode.SAVED.value} ")
            return not any(text in self.failed_batch_jobs[0].failure_message for text in neutral)
        if any(pod.disruption or pod.hang or pod.exit_code == ExitCode.SAVED for pod in self.pods):
            return False
        return True if any(pod.phase == "Failed" for pod in self.pods) else None


def find_pods(history: JobHistory, observed: Observed) -> AttemptPods:
    """Find the pods of the last attempt."""
    evidence, since = observed.find_evidence(history.ordinal), history.operator.resumed_at
    if evidence is None:
        return AttemptPods()
    found = _pick(evidence, evidence.pods, observed, since=since)
    if since is None:
        return found
    # The Jobs of the earlier attempts with this ordinal do not count.
    return replace(found, failed_batch_jobs=_find_present_failures(evidence, observed))


def find_ended_pods(history: JobHistory, observed: Observed) -> AttemptPods:
    """Find the pods of the newest ended attempt, without those of the attempts before and after it."""
    closed, last = history.closed, find_pods(history, observed)
    if not closed:
        return AttemptPods()
    if history.operator.started and not history.is_running:
        # It is the last attempt of the current JobSet. Pods that were created later belong to a withdrawn attempt.
        end = closed[-1].end
        return last.keep(lambda pod: end is None or pod.created_at <= end)
    # Otherwise a later attempt runs, or the current JobSet has had none yet.
    evidence = observed.find_evidence(_find_ended_ordinal(history, observed))
    if evidence is None:
        return AttemptPods()
    later = {pod.uid for pod in last.pods}
    earlier = tuple(pod for pod in evidence.pods if pod.uid not in later)
    # The time of an end that was not observed is a guess, so it excludes no pods.
    since = closed[-2].end if len(closed) > 1 and not closed[-2].inferred else None
    found = _pick(evidence, earlier, observed, since=since)
    # Without any of its pods, the Jobs may be those of another attempt.
    return found if found.pods or not evidence.pods else AttemptPods()


def _find_ended_ordinal(history: JobHistory, observed: Observed) -> tuple[int, int]:
    """Find the ordinal of the newest ended attempt, which isn't the last attempt of the current JobSet."""
    number, restarts = history.ordinal
    if history.operator.started and history.operator.resumed_at is not None:
        return number, restarts  # the running attempt shares it
    if history.operator.started and restarts > 0:
        return number, restarts - 1
    # It was the last attempt of an earlier JobSet, whose count of restarts is no longer known.
    return max((e.ordinal for e in observed.evidence if e.ordinal[0] < number), default=(-1, 0))


def _pick(
    evidence: AttemptEvidence, pods: tuple[Pod, ...], observed: Observed, *, since: int | None
) -> AttemptPods:
    """Pick the pods of the attempt that began at `since`; all of them if that is None."""
    picked = [pod for pod in pods if since is None or _is_of_attempt(pod, since)]
    present = tuple(_list_present(picked, observed))
    uids = {pod.uid for pod in present}
    # A replaced pod counts only if it was created in this attempt.
    replaced = tuple(p for p in picked if p.uid not in uids and (since is None or p.created_at >= since))
    # The attempt continued with the pods that replaced those that had exited 0.
    return AttemptPods(
        pods=present if all(map(_has_succeeded, replaced)) else (*replaced, *present),
        present=present,
        failed_batch_jobs=evidence.failed_batch_jobs,
        ordinal=evidence.ordinal,
    )


def find_current_report(observed: Observed, history: JobHistory) -> LastReport | None:
    """Return the newest report if it belongs to the last attempt."""
    report, last = observed.report, history.last_attempt
    if report is None or last is None or report.ordinal != history.ordinal:
        return None
    return report if is_of_start(report, last, resumed=history.operator.resumed_at is not None) else None


def is_of_start(report: LastReport, attempt: Attempt, *, resumed: bool) -> bool:
    """Return True if a report with the attempt's ordinal belongs to it.

    `resumed` is True if an earlier attempt has the same ordinal. Only then are the times compared.
    """
    return not resumed or report.received_at >= attempt.start


def find_done(view: View, history: JobHistory) -> tuple[int, list[Pod]]:
    """Count the pods of the last attempt that are done, and list those that were observed.

    A pod is done if it exited 0 without a hidden exit code. A pod whose deletion was requested is done only if its Job
    counts it: otherwise the Job creates another pod in its place.
    """
    evidence, total_steps = view.observed.find_evidence(history.ordinal), view.job.spec.total_steps
    if evidence is None:
        return 0, []
    present = _list_present(evidence.pods, view.observed)
    hidden = {pod.uid for pod in present if _has_hidden_exit(pod, total_steps)}
    done = [p for p in present if p.terminal and p.exit_code == ExitCode.DONE and p.uid not in hidden]
    n_counted = evidence.n_succeeded - len(hidden)  # by the Jobs, which may lag behind the pods
    return max(n_counted, sum(pod.deletion_requested_at is None for pod in done)), done


def find_new_pods(history: JobHistory, observed: Observed) -> int | None:
    """Find the start of a new attempt without a counted restart; None if there is none.

    Its pods run although the last attempt has ended, and JobSet won't replace them. Either a Job was deleted, and
    JobSet replaced it without counting a restart. Or an operator that has just started observed none of the pods that
    had ended.
    """
    evidence, last = observed.find_evidence(history.ordinal), history.last_attempt
    if evidence is None or last is None or last.end is None:
        return None
    present, existing = _list_present(evidence.pods, observed), {pod.uid for pod in observed.pods}
    alive = [pod for pod in present if _is_alive(pod)]
    others_succeeded = all(_is_alive(pod) or _has_succeeded(pod) for pod in present)
    exist = bool(alive) and all(pod.uid in existing for pod in alive)
    if _find_present_failures(evidence, observed) or not (exist and others_succeeded):
        return None
    uids = {pod.uid for pod in present}
    replaced = {pod.rank for pod in evidence.pods if pod.uid not in uids}
    return int(min((pod.created_at for pod in present if pod.rank in replaced), default=last.end))


def _has_succeeded(pod: Pod) -> bool:
    return pod.phase == "Succeeded" and not exit_code_was_hidden(pod)


def _has_failed(pod: Pod) -> bool:
    return pod.phase == "Failed" or (pod.phase == "Succeeded" and exit_code_was_hidden(pod))


def _has_hidden_exit(pod: Pod, total_steps: int | None) -> bool:
    """Return True if the pod's exit code is hidden and it is not done: one that saved after the last step is done."""
    step = None if pod.termination is None else pod.termination.step
    at_end = step is not None and total_steps is not None and step >= total_steps
    return exit_code_was_hidden(pod) and not (at_end and pod.code == ExitCode.SAVED)


def _is_of_attempt(pod: Pod, since: int) -> bool:
    """Return True if the pod belongs to the attempt that began at `since`.

    Such a pod was created later, or it still ran then and its deletion was requested later, if at all.
    """
    if pod.created_at >= since:
        return True
    if pod.terminal and (pod.finished_at is None or int(pod.finished_at) <= since):
        return False
    return pod.deletion_requested_at is None or pod.deletion_requested_at > since


def _is_alive(pod: Pod) -> bool:
    return not pod.terminal and pod.deletion_requested_at is None


def _list_present(pods: Iterable[Pod], observed: Observed) -> list[Pod]:
    """List the present pod of each rank: the live one, even if a clock went back since, else the newest one."""
    existing = {pod.uid for pod in observed.pods}
    order = sorted(pods, key=lambda p: (_is_alive(p) and p.uid in existing, p.created_at, _is_alive(p)))
    return list({pod.rank: pod for pod in order}.values())


def _find_present_failures(evidence: AttemptEvidence, observed: Observed) -> tuple[BatchJob, ...]:
    """Find the failed Jobs that JobSet still has to act on, without those that it has replaced since."""
    present_jobs = {pod.rank: pod.owner_uid for pod in _list_present(evidence.pods, observed)}
    replaced = {pod.owner_uid for pod in evidence.pods if present_jobs[pod.rank] != pod.owner_uid}
    return tuple(failed for failed in evidence.failed_batch_jobs if failed.uid not in replaced)
