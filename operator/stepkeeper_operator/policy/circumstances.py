"""Gather the facts about an attempt's end other than its pods."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.build.placement import on_spot
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import Node
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.machines import MachinesLoss, explain_loss, find_maintenance

__all__ = ["Circumstances", "gather_circumstances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The facts about an attempt's end other than its pods."""

    nodes: Mapping[str, Node]
    spot: bool
    """True if the job asked for Spot machines, so that a vanished node counts as preempted."""

    committed: bool
    """True if the attempt committed a checkpoint."""

    notice: str | None
    """The notice of a disruption that its reports named."""

    fatal_codes: frozenset[int]
    counted: bool | None
    """True if JobSet took the end for a failure. None: it hasn't judged yet."""

    rule: str | None
    """Name of the JobSet rule that matched."""

    n_hosts: int
    """The number of pods that an attempt has."""

    loss: MachinesLoss | None = None
    """Set if the machines of the job's QueuedResource are gone."""

    maintenance: MachinesLoss | None = None
    """Set if one of these machines has maintenance."""


def gather_circumstances(
    job: CheckpointedTrainingJob,
    observed: Observed,
    attempt: Attempt,
    evidence: AttemptEvidence | None,
    *,
    now: float,
    counted: bool | None = None,
    rule: str | None = None,
) -> Circumstances:
    """Gather the facts about the end of `attempt`."""
    report = observed.report
    ours = evidence is not None and report is not None and report.ordinal == evidence.ordinal
    spot = on_spot(job.spec.placement)
    nodes = observed.nodes
    if observed.machines is not None and observed.machines.spot:
        # Machines of Cloud TPU don't carry GKE's label.
        spot, nodes = True, {name: replace(node, spot=True) for name, node in nodes.items()}
    return Circumstances(
        nodes=nodes,
        spot=spot,
        loss=explain_loss(job, observed, now=now),
        maintenance=find_maintenance(job, observed, now=now),
        committed=_says_committed(evidence)
        or _has_committed(job, attempt)
        or (ours and report is not None and bool(report.report.commits)),
        notice=report.report.notice if ours and report is not None else None,
        fatal_codes=frozenset(job.spec.restarts.fatal_exit_codes),
        counted=counted,
        rule=rule,
        n_hosts=observed.count_hosts(job),
    )


def _says_committed(evidence: AttemptEvidence | None) -> bool:
    ends = () if evidence is None else tuple(pod.termination for pod in evidence.pods)
    return any(end is not None and end.committed is not None for end in ends)


def _has_committed(job: CheckpointedTrainingJob, attempt: Attempt) -> bool:
    checkpoint = job.status.checkpoint
    if checkpoint is None or checkpoint.latest is None:
        return False
    in_time = checkpoint.latest.time is not None and checkpoint.latest.time >= attempt.start
    return in_time or (attempt.from_step is not None and checkpoint.latest.step > attempt.from_step)
