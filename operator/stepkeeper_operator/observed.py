"""Define the input of a decision about one job, besides the job itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.memory import Rejection
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import ConfigMap, JobSet, Node, Pod, QueuedMachines

__all__ = ["JOBSET_RECHECK_S", "REJECTED_AGAIN_S", "Leftover", "Observed", "waits_for_jobset"]

JOBSET_RECHECK_S: Final = 5.0
"""Seconds for which the cached state of an awaited JobSet is believed."""


REJECTED_AGAIN_S: Final = 60.0
"""Seconds until a JobSet that the API server refused is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """The Jobs and pods of an earlier JobSet that still exist while the job has no JobSet."""

    name: str
    """Kind and name of one of them."""

    orphans: tuple[Pod, ...] = ()
    """Pods whose Job is gone and that nobody has deleted since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cluster around one job at one moment."""

    jobset: JobSet | None = None
    """The JobSet that has the job's name, whoever owns it."""

    pods: tuple[Pod, ...] = ()
    """Pods of all attempts that left any."""

    leftover: Leftover | None = None
    """Set only where there is no JobSet."""

    evidence: tuple[AttemptEvidence, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """The nodes that pods in `pods` and `evidence` were on, by name."""

    n_nodes: int = 0
    n_unknown_nodes: int = 0
    """Both counts are over the whole cluster."""

    report: LastReport | None = None
    config_map: ConfigMap | None = None
    ca_pem: str = ""
    rejection: Rejection | None = None
    """Set only for a refusal of what was made from the present generation."""

    unreadable: tuple[str, ...] = ()
    """Path and reason of each part of the spec that this operator can't read. The job is without them."""

    held: bool = False
    """True if the job isn't accepted: what runs goes on, and nothing starts."""

    machines: QueuedMachines | None = None
    """The QueuedResource that the job names; None if it names none, or there is none of that name."""

    queued_resources_managed: bool = True
    """False: this operator has the kind QueuedResource switched off."""

    operator_started_at: float = 0.0
    last_write_at: float = 0.0
    """Unix time when this operator last wrote the job's status."""

    def find_evidence(self, ordinal: tuple[int, int]) -> AttemptEvidence | None:
        """Find all evidence with that ordinal. The attempts before and after a suspension have the same one."""
        return next((evidence for evidence in self.evidence if evidence.ordinal == ordinal), None)


def waits_for_jobset(job: CheckpointedTrainingJob, jobset: JobSet) -> bool:
    """Return True if the job goes on only after JobSet has acted: no attempt runs, and it isn't suspended."""
    attempts = job.status.attempts
    return bool(attempts) and attempts[-1].end is not None and not jobset.suspend
