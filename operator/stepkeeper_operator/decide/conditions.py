"""Conditions, and the one word that is made of them."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Condition,
    ConditionStatus,
    ConditionType,
    Phase,
)
from stepkeeper_operator.decision import ConditionUpdate
from stepkeeper_operator.facts import JobSet, Pod
from stepkeeper_operator.labels import JOB_NAME_LABEL
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import Books

__all__ = [
    "NOT_RUNNING",
    "NO_PODS",
    "NO_PODS_S",
    "phase_of",
    "reporting_claim",
    "running_claim",
    "settle",
]

_MESSAGE_LIMIT: Final = 2048
NOT_RUNNING: Final = "NotRunning"
NO_PODS: Final = "NoPods"
NO_PODS_S: Final = 30
"""So long nobody wonders that there are no pods."""
_STOPPING: Final = "Stopping"
"""A pod of the running attempt is being deleted: the attempt is as good as over."""

_TRAINER_ENDED: Final = "TrainerEnded"
"""A pod's trainer has ended, and another of its containers keeps the pod alive."""

_STATUS: Final = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}


def settle(
    job: CheckpointedTrainingJob, claims: tuple[ConditionUpdate, ...], *, now: float
) -> tuple[Condition, ...]:
    """The conditions with these claims in them; a time moves only when a status does."""
    before = {condition.type: condition for condition in job.status.conditions}
    after = dict(before)
    for claim in claims:
        status = _STATUS[claim.status]
        known = before.get(claim.type)
        since = known.last_transition_time if known is not None and known.status is status else int(now)
        after[claim.type] = Condition(
            type=claim.type,
            status=status,
            reason=claim.reason,
            message=claim.message[:_MESSAGE_LIMIT],
            last_transition_time=since,
            observed_generation=job.metadata.generation,
        )
    order = [kind.value for kind in ConditionType]
    return tuple(sorted(after.values(), key=lambda c: order.index(c.type) if c.type in order else len(order)))


def phase_of(conditions: tuple[Condition, ...], jobset: JobSet | None, books: Books) -> Phase:
    """Derived from the conditions; what none of them says is how a job that doesn't run came to that."""
    true = {condition.type for condition in conditions if condition.status is ConditionStatus.TRUE}
    by_condition = (
        (ConditionType.COMPLETE, Phase.COMPLETE),
        (ConditionType.FAILED, Phase.FAILED),
        (ConditionType.SUSPENDED, Phase.SUSPENDED),
        (ConditionType.RUNNING, Phase.RUNNING),
    )
    for kind, phase in by_condition:
        if kind in true:
            return phase
    if any(condition.reason == _TRAINER_ENDED for condition in conditions):
        return Phase.RUNNING
    stopping = any(condition.reason == _STOPPING for condition in conditions)
    if stopping or len(books.attempts) > 1 or (books.attempts and not books.open):
        return Phase.RESTARTING
    return Phase.PENDING if jobset is None else Phase.STARTING


def running_claim(
    job: CheckpointedTrainingJob,
    observed: Observed,
    jobset: JobSet | None,
    books: Books,
    *,
    waiting: str | None,
    now: float,
) -> ConditionUpdate:
    """Whether all pods of the present attempt run; if not, what they wait for."""
    kind = ConditionType.RUNNING
    if jobset is None:
        return ConditionUpdate(
            type=kind, status=False, reason="NoJobSet", message=waiting or "its JobSet is being made"
        )
    if not books.open:
        ended = books.last.cause if books.last is not None and books.last.cause else "it has not started"
        return ConditionUpdate(
            type=kind, status=False, reason="Ended", message=waiting or f"the last attempt ended: {ended}"
        )
    n_hosts = job.spec.placement.n_hosts
    present = [pod for pod in observed.pods if pod.ordinal == books.ordinal]
    alive = [pod for pod in present if pod.phase == "Running" and pod.started and pod.deadline is None]
    running = [pod for pod in alive if pod.exit_code is None]
    if len(running) >= n_hosts:
        return ConditionUpdate(
            type=kind, status=True, reason="AllPodsRun", message=f"{n_hosts} of {n_hosts} pods run"
        )
    outlived = next((pod for pod in alive if pod.exit_code is not None and pod.others_running), None)
    if outlived is not None:
        return ConditionUpdate(type=kind, status=False, reason=_TRAINER_ENDED, message=_outlived(outlived))
    reason, detail = _obstacle(present)
    if not present and books.last is not None and now >= books.last.start + NO_PODS_S:
        reason, name, describe = NO_PODS, job.metadata.name, f"kubectl -n {job.metadata.namespace} describe"
        detail = (
            f", and none was made for {NO_PODS_S} s. The events of its JobSet and Jobs say why: {describe} jobset "
            f"{name}; {describe} jobs -l {JOB_NAME_LABEL}={name}"
        )
    message = f"{len(running)} of {n_hosts} pods run{detail}"
    return ConditionUpdate(type=kind, status=False, reason=reason, message=message)


def _outlived(pod: Pod) -> str:
    names = ", ".join(repr(name) for name in pod.others_running)
    return (
        f"the trainer of {pod.name} exited with code {pod.exit_code}, and container {names} still runs: the pod "
        "ends only with all of them. Move what is to end with the trainer to initContainers with "
        "restartPolicy: Always"
    )


def reporting_claim(
    observed: Observed, books: Books, *, running: bool, now: float, silence_s: int
) -> tuple[ConditionUpdate, float | None]:
    """Whether reports arrive, and when it has to be asked again."""
    kind = ConditionType.REPORTING
    if not running or books.last is None:
        return ConditionUpdate(type=kind, status=False, reason=NOT_RUNNING, message="no attempt runs"), None
    heard = observed.report
    if heard is not None and heard.ordinal == books.ordinal and now - heard.received_at < silence_s:
        return ConditionUpdate(
            type=kind, status=True, reason="ReportsArrive"
        ), heard.received_at + silence_s - now
    since = max(books.last.start, observed.operator_started_at)
    if heard is not None and heard.ordinal == books.ordinal:
        since = max(since, heard.received_at)
    if now - since < silence_s:
        unknown = ConditionUpdate(
            type=kind, status=None, reason="NoReportYet", message="no report has arrived yet"
        )
        return unknown, since + silence_s - now
    message = (
        f"no report for {silence_s} s. Training goes on without reports; status shows what was last known. Likely: "
        "the training code doesn't use stepkeeper.from_env(), it still starts, a NetworkPolicy keeps the pods from "
        "the operator's Service, or the trainer stands still"
    )
    return ConditionUpdate(type=kind, status=False, reason="NoReports", message=message), None


def _obstacle(pods: list[Pod]) -> tuple[str, str]:
    for pod in pods:
        if pod.deadline is not None:
            return _STOPPING, f"; {pod.name} on node {pod.node} is being stopped"
    for pod in pods:
        if pod.waiting:
            reason = pod.waiting.partition(":")[0]
            return reason if reason.isalnum() else "Waiting", f"; {pod.name} waits: {pod.waiting}"
    return "Starting", ""
