"""Read a Workload, by which Kueue admits and evicts a JobSet."""

from dataclasses import dataclass

from stepkeeper_operator.facts.raw import RawObject, condition_of, controller_of

__all__ = ["Workload", "read_workload"]

_MESSAGE_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A JobSet as Kueue sees it: its quota, and its eviction."""

    namespace: str
    name: str
    uid: str
    jobset_name: str
    jobset_uid: str
    """Uid of the JobSet that owns it. Empty: none does."""

    quota_reserved: bool
    reason: str
    """Kueue's reason why it has its quota, or none."""

    message: str
    eviction: str | None
    """Reason and message of its eviction, until it has quota again."""


def read_workload(raw: RawObject) -> Workload:
    """Read the facts of a Workload object."""
    meta = raw["metadata"]
    owner = controller_of(raw) or {}
    owned = owner.get("kind") == "JobSet"
    quota, evicted = condition_of(raw, "QuotaReserved"), condition_of(raw, "Evicted")
    eviction = f"{evicted.get('reason', '')}: {evicted.get('message', '')}"[:_MESSAGE_LIMIT]
    return Workload(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        jobset_name=str(owner["name"]) if owned else "",
        jobset_uid=str(owner["uid"]) if owned else "",
        quota_reserved=quota.get("status") == "True",
        reason=quota.get("reason") or "Pending",
        message=quota.get("message", "Kueue has not looked at it yet")[:_MESSAGE_LIMIT],
        eviction=eviction if evicted.get("status") == "True" else None,
    )
