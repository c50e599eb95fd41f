"""Gather the evidence of one attempt's end: its pods, their nodes, reports, JobSet's judgement, and the machines."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.training_jobs.attempts.attempt_pods import AttemptPods
from stepkeeper_operator.training_jobs.attempts.machines import MachinesLoss, explain_loss, find_maintenance
from stepkeeper_operator.training_jobs.build.placement import on_spot_machines
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["Evidence", "gather_evidence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All evidence about the end of one attempt."""

    pods: tuple[Pod, ...]
    job_messages: tuple[str, ...] = ()
    """The messages of its failed Jobs, which remain when the pods are gone."""

    nodes: Mapping[str, Node]
    on_spot: bool
    """True if it ran on Spot machines, so that a vanished node counts as preempted."""

    has_committed: bool
    """True if the attempt committed a checkpoint."""

    notice: str | None
    """The notice of a disruption in its reports."""

    fatal_codes: frozenset[int]
    counted: bool | None
    """True if JobSet counted the end as a failure; None if it has not judged yet."""

    rule: str | None
    """Name of the JobSet rule that matched."""

    n_hosts: int
    """The number of pods of an attempt."""

    loss: MachinesLoss | None = None
    """Set if the machines of the job's QueuedResource are gone."""

    maintenance: MachinesLoss | None = None
    """Set if one of these machines is under maintenance."""


def gather_evidence(
    view: View, attempt: Attempt, pods: AttemptPods, *, counted: bool | None = None, rule: str | None = None
) -> Evidence:
    """Gather the evidence of the end of `attempt` with its `pods`."""
    job, observed = view.job, view.observed
    nodes = observed.nodes
    if observed.machines is not None and observed.machines.spot:
        # Machines of Cloud TPU lack GKE's label.
        nodes = {name: replace(node, spot=True) for name, node in nodes.items()}
    report = observed.report
    if report is not None and report.ordinal != pods.ordinal:
        report = None  # it is of another attempt
    probes = observed.failed_probes
    return Evidence(
        pods=tuple(replace(pod, failed_probe=probes.get(pod.uid, "")) for pod in pods.pods),
        job_messages=tuple(each.failure_message for each in pods.failed_batch_jobs),
        nodes=nodes,
        on_spot=on_spot_machines(job, observed.machines),
        loss=explain_loss(view),
        maintenance=find_maintenance(view),
        has_committed=_has_committed(job, attempt, pods, report),
        notice=attempt.notice if report is None else report.report.notice or attempt.notice,
        fatal_codes=frozenset(job.spec.restarts.fatal_exit_codes),
        counted=counted,
        rule=rule,
        n_hosts=view.n_hosts,
    )


def _has_committed(
    job: CheckpointedTrainingJob, attempt: Attempt, pods: AttemptPods, report: LastReport | None
) -> bool:
    if report is not None and report.report.commits:
        return True
    if any(pod.termination is not None and pod.termination.committed is not None for pod in pods.pods):
        return True
    latest = None if job.status.checkpoint is None else job.status.checkpoint.latest
    if latest is None:
        return False
    in_time = latest.time is not None and latest.time >= attempt.start
    return in_time or (attempt.from_step is not None and latest.step > attempt.from_step)
