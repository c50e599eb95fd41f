"""Derive condition Running: whether all pods of the present attempt run, and if not, what they wait for."""

from functools import partial
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import (
    ConditionStatus,
    ConditionType,
    ConditionUpdate,
    find_condition,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.labels import JOB_NAME_LABEL
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_done
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["compute_missing_s", "derive_running"]

_update: Final = partial(ConditionUpdate, ConditionType.RUNNING, status=False)
_NORMAL_S: Final = 30
"""Seconds for which a pause in creating the pods is normal."""


def derive_running(view: View, history: JobHistory, *, waiting: str | None) -> ConditionUpdate:
    """Check whether all pods of the present attempt run. If not, the message explains what they wait for."""
    if view.jobset is None:
        return _update(Reason.NO_JOB_SET, waiting or "its JobSet is being created")
    n_hosts = view.n_hosts
    present = [pod for pod in view.observed.pods if pod.ordinal == history.ordinal]
    started = [pod for pod in present if pod.phase == "Running" and pod.started]
    alive = [pod for pod in started if pod.deletion_requested_at is None]
    running = [pod for pod in alive if pod.exit_code is None]  # the exit code is the trainer's
    n_done, _ = find_done(view, history)
    if n_done and n_done + len(running) >= n_hosts:
        # The job ends when JobSet reports completion.
        return _update(Reason.FINISHING, f"{n_done} of {n_hosts} pods have exited 0")
    if not history.is_running:
        last = history.last_attempt
        ended = last.cause if last is not None and last.cause else "it has not started"
        return _update(Reason.ENDED, waiting or f"the last attempt ended: {ended}")
    if len(running) >= n_hosts:
        return _update(Reason.ALL_PODS_RUN, f"{n_hosts} of {n_hosts} pods are running", status=True)
    outlived = next((pod for pod in alive if pod.exit_code is not None and pod.others_running), None)
    if outlived is not None:
        return _update(Reason.TRAINER_ENDED, _describe_outlived(outlived))
    reason, detail = _find_obstacle(present)
    missing_s = compute_missing_s(view, history)
    if reason == Reason.STARTING and missing_s is not None and missing_s <= 0:
        # No existing pod explains the wait, but others do not appear.
        reason, detail = Reason.NO_PODS, _describe_missing(view.job, len(present), n_hosts)
    return _update(reason, f"{len(running)} of {n_hosts} pods are running{detail}")


def compute_missing_s(view: View, history: JobHistory) -> float | None:
    """Compute the seconds until missing pods count as a problem: 0 or less if they do, None if no pod is missing.

    The controllers create the pods of many hosts one by one, and replace some. So the time counts since the start,
    since the newest pod was created, and since all pods last ran, whichever is latest.
    """
    last = history.last_attempt
    if last is None or last.end is not None:
        return None
    n_done, done = find_done(view, history)
    present = [pod for pod in view.observed.pods if pod.ordinal == history.ordinal]
    known_ranks = {pod.rank for pod in (*present, *done)}
    n_gone = max(0, n_done - len(done))  # only their Jobs still count these
    if len(known_ranks) + n_gone >= view.n_hosts:
        return None
    running = find_condition(view.job.status.conditions, ConditionType.RUNNING)
    all_ran_at = 0.0
    if running is not None:
        all_ran_at = view.now if running.status is ConditionStatus.TRUE else running.last_transition_time
    return max(last.start, all_ran_at, *(pod.created_at for pod in present)) + _NORMAL_S - view.now


def _describe_missing(job: CheckpointedTrainingJob, n_present: int, n_hosts: int) -> str:
    """Complete the sentence about the running pods: how many exist, and where to look for the cause."""
    name, describe = job.metadata.name, f"kubectl -n {job.metadata.namespace} describe"
    found = f", {n_present} of {n_hosts} exist, and no other" if n_present else ", and none"
    return (
        f"{found} was created in the last {_NORMAL_S} s. For the cause, see the events of its JobSet and Jobs: "
        f"{describe} jobset {name}; {describe} jobs -l {JOB_NAME_LABEL}={name}"
    )


def _describe_outlived(pod: Pod) -> str:
    names = ", ".join(repr(name) for name in pod.others_running)
    return (
        f"the trainer of {pod.name} exited with code {pod.exit_code}, but container {names} is still running: the pod "
        "ends when all its containers have ended. To end a container with the trainer, make it an init container with "
        "restartPolicy: Always"
    )


def _find_obstacle(pods: list[Pod]) -> tuple[Reason, str]:
    for pod in pods:
        if pod.deletion_requested_at is not None:
            return Reason.STOPPING, f"; {pod.name} on node {pod.node} is being stopped"
    for pod in pods:
        if pod.waiting:
            return Reason.POD_WAITING, f"; {pod.name} is waiting: {pod.waiting}"
    return Reason.STARTING, ""
