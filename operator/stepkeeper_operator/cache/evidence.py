"""What was seen of an attempt's pods and Jobs, kept after they are gone: JobSet removes them within a second."""

from dataclasses import dataclass, field, replace

from stepkeeper_operator.facts import Job, Pod

__all__ = ["AttemptEvidence", "EvidenceCache"]

_KEPT_ATTEMPTS = 4

Ordinal = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvidence:
    """The last that was seen of every pod and Job of one start of the gang."""

    ordinal: Ordinal
    pods: tuple[Pod, ...] = ()
    failed_jobs: tuple[Job, ...] = ()


@dataclass(slots=True)
class _Record:
    pods: dict[str, Pod] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)


class EvidenceCache:
    """Evidence by job and attempt. The newest few attempts of a job are kept."""

    def __init__(self) -> None:
        self._records: dict[str, dict[Ordinal, _Record]] = {}

    def add_pod(self, pod: Pod) -> None:
        """The pod's last state is known, also after its deletion."""
        if pod.ordinal is not None and pod.job_uid:
            record = self._record(pod.job_uid, pod.ordinal)
            known = record.pods.get(pod.uid)
            record.pods[pod.uid] = pod if known is None else _merge_pod(known, pod)

    def add_job(self, job: Job) -> None:
        """The Job's last state is known, also after its deletion."""
        if job.ordinal is not None and job.job_uid:
            record = self._record(job.job_uid, job.ordinal)
            known = record.jobs.get(job.uid)
            if known is None or known.failure_reason is None or job.failure_reason is not None:
                record.jobs[job.uid] = job

    def list_attempts(self, job_uid: str) -> tuple[AttemptEvidence, ...]:
        """All evidence of a job, oldest attempt first."""
        return tuple(
            AttemptEvidence(
                ordinal=ordinal,
                pods=tuple(sorted(record.pods.values(), key=lambda pod: (pod.rank, pod.uid))),
                failed_jobs=tuple(job for job in record.jobs.values() if job.failure_reason is not None),
            )
            for ordinal, record in sorted(self._records.get(job_uid, {}).items())
        )

    def forget_job(self, job_uid: str) -> None:
        """Nothing is kept of a job that is gone."""
        self._records.pop(job_uid, None)

    def _record(self, job_uid: str, ordinal: Ordinal) -> _Record:
        records = self._records.setdefault(job_uid, {})
        record = records.setdefault(ordinal, _Record())
        while len(records) > _KEPT_ATTEMPTS:
            del records[min(records)]
        return record


def _merge_pod(known: Pod, seen: Pod) -> Pod:
    """`seen`, with what `known` said of its end: conditions are taken back, exit codes are lost with a kubelet."""
    if known.exit_code is not None and seen.exit_code is None:
        return known
    if known.terminal and known.deadline is None:
        # It is buried, not killed.
        seen = replace(seen, deadline=None)
    # A DisruptionTarget that came to nothing is set to False after two minutes, on a pod that goes on.
    goes_on = seen.deadline is None and not seen.terminal
    if known.disruption is None or seen.disruption is not None or goes_on:
        return seen
    return replace(seen, disruption=known.disruption)
