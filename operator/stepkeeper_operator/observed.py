"""Everything that a decision about one job is made from, besides the job itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import ConfigMap, JobSet, Node, Pod

__all__ = ["JOBSET_RECHECK_S", "Leftover", "Observed", "waits_for_jobset"]

JOBSET_RECHECK_S: Final = 5.0
"""So long a JobSet that is waited for is believed to be as it was last heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What is still there of an earlier JobSet, where there is none now."""

    name: str
    """Of one of them, with its kind."""

    orphans: tuple[Pod, ...] = ()
    """Pods whose Job is gone, and that nobody has deleted since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cluster around one job, at one moment."""

    jobset: JobSet | None = None
    """The JobSet that has the job's name, whosever it is."""

    pods: tuple[Pod, ...] = ()
    """Of all attempts that left any."""

    leftover: Leftover | None = None
    """Where there is no JobSet: Jobs and pods of an earlier one that are still there."""

    evidence: tuple[AttemptEvidence, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """Those that pods in `pods` and `evidence` were on."""

    n_nodes: int = 0
    n_unknown_nodes: int = 0
    """Over the whole cluster."""

    report: LastReport | None = None
    config_map: ConfigMap | None = None
    ca_pem: str = ""
    rejection: str | None = None
    """What the API server said of the last JobSet that was to be made for this generation."""

    operator_started_at: float = 0.0
    last_write_at: float = 0.0
    """When this operator last wrote the job's status."""

    def find_evidence(self, ordinal: tuple[int, int]) -> AttemptEvidence | None:
        return next((evidence for evidence in self.evidence if evidence.ordinal == ordinal), None)


def waits_for_jobset(job: CheckpointedTrainingJob, jobset: JobSet) -> bool:
    """The job goes on when JobSet has done something: no attempt runs, and nobody wants it so."""
    attempts = job.status.attempts
    return bool(attempts) and attempts[-1].end is not None and not jobset.suspend
