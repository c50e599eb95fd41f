"""Keep the last state of an attempt's pods and Jobs after they are gone: JobSet deletes them within a second."""

from dataclasses import dataclass, field, replace

from stepkeeper_operator.facts.jobset import BatchJob
from stepkeeper_operator.facts.pod import Pod

__all__ = ["AttemptEvidence", "EvidenceCache"]

_KEPT_ATTEMPTS = 4

Ordinal = tuple[int, int]
"""Names an attempt: the number of its JobSet, and the restarts of that JobSet before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvidence:
    """The last known state of every pod and Job of one attempt."""

    ordinal: Ordinal
    pods: tuple[Pod, ...] = ()
    failed_batch_jobs: tuple[BatchJob, ...] = ()
    n_succeeded: int = 0
    """Pods that exited 0, as their Jobs count them."""


@dataclass(slots=True)
class _Record:
    pods: dict[str, Pod] = field(default_factory=dict)
    batch_jobs: dict[str, BatchJob] = field(default_factory=dict)


class EvidenceCache:
    """Keep evidence by job and attempt, for the newest few attempts of each job."""

    def __init__(self) -> None:
        self._records: dict[str, dict[Ordinal, _Record]] = {}

    def add(self, item: BatchJob | Pod) -> None:
        """Keep the last state of one of a job's own Jobs or pods, also after its deletion."""
        if item.ordinal is None or not item.job_uid:
            return
        record = self._get_record(item.job_uid, item.ordinal)
        if isinstance(item, Pod):
            pod = record.pods.get(item.uid)
            record.pods[item.uid] = item if pod is None else _merge_pod(pod, item)
            return
        known = record.batch_jobs.get(item.uid)
        loses_failure = known is not None and known.failure_reason is not None and item.failure_reason is None
        if not loses_failure:
            record.batch_jobs[item.uid] = item

    def list_attempts(self, job_uid: str) -> tuple[AttemptEvidence, ...]:
        """List the evidence of a job, oldest attempt first."""
        found = []
        for ordinal, record in sorted(self._records.get(job_uid, {}).items()):
            pods = tuple(sorted(record.pods.values(), key=lambda pod: (pod.rank, pod.uid)))
            batch_jobs = list(record.batch_jobs.values())
            failed = tuple(batch_job for batch_job in batch_jobs if batch_job.failure_reason is not None)
            # A recreated Job has the name of the previous one, comes later, and replaces its count.
            succeeded = {batch_job.name: batch_job.n_succeeded for batch_job in batch_jobs}
            evidence = AttemptEvidence(
                ordinal=ordinal, pods=pods, failed_batch_jobs=failed, n_succeeded=sum(succeeded.values())
            )
            found.append(evidence)
        return tuple(found)

    def forget_job(self, job_uid: str) -> None:
        """Drop the evidence of a job that is gone."""
        self._records.pop(job_uid, None)

    def _get_record(self, job_uid: str, ordinal: Ordinal) -> _Record:
        records = self._records.setdefault(job_uid, {})
        record = records.setdefault(ordinal, _Record())
        while len(records) > _KEPT_ATTEMPTS:
            del records[min(records)]
        return record


def _merge_pod(known: Pod, seen: Pod) -> Pod:
    """Return the newer `seen`, with facts about its end that only `known` has: Kubernetes can reset and lose them."""
    if known.exit_code is not None and seen.exit_code is None:
        return known
    if known.terminal and known.deadline is None:
        # The pod had already ended: this deletion removes its object, and a disruption is too late to end it.
        seen = replace(seen, deadline=None, disruption=known.disruption)
    # A DisruptionTarget without a deletion is set to False after two minutes, on a pod that keeps running.
    keeps_running = seen.deadline is None and not seen.terminal
    if known.disruption is None or seen.disruption is not None or keeps_running:
        return seen
    return replace(seen, disruption=known.disruption)
