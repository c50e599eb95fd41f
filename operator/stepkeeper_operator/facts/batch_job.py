"""Read a batch Job of a JobSet: how it ended, and how many of its pods have exited 0."""

from dataclasses import dataclass

from stepkeeper_operator.facts.raw import RawObject, condition_of, controller_uid, ordinal_of
from stepkeeper_operator.labels import JOB_UID_LABEL, JOBSET_NUMBER_LABEL, RESTART_ATTEMPT_LABEL

__all__ = ["BatchJob", "read_batch_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    namespace: str
    name: str
    uid: str
    job_uid: str
    owner_uid: str | None
    """Uid of the JobSet that controls it."""

    ordinal: tuple[int, int] | None
    failure_reason: str | None
    """Set from the condition FailureTarget on, before the last pod has ended."""

    failure_message: str
    n_succeeded: int = 0
    """Pods that have exited 0, also those that were told to stop before. The Job makes no other ones for them."""


def read_batch_job(raw: RawObject) -> BatchJob:
    """Read the facts of a batch Job object."""
    meta = raw["metadata"]
    failure = next(
        (c for kind in ("Failed", "FailureTarget") if (c := condition_of(raw, kind)).get("status") == "True"),
        {},
    )
    return BatchJob(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        job_uid=(meta.get("labels") or {}).get(JOB_UID_LABEL, ""),
        owner_uid=controller_uid(raw),
        ordinal=ordinal_of(raw, JOBSET_NUMBER_LABEL, RESTART_ATTEMPT_LABEL),
        failure_reason=failure.get("reason"),
        failure_message=failure.get("message", ""),
        n_succeeded=raw.get("status", {}).get("succeeded") or 0,
    )
