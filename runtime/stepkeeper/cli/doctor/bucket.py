"""Judge what a bucket's settings mean for a root in it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from stepkeeper.cli.render import age_text

__all__ = ["Finding", "judge_bucket"]

_NAMES: Final = ("0.json", "0.distcp", ".metadata")
"""Ends of the names of a root's objects, but for pins."""

_COLD: Final = frozenset({"NEARLINE", "COLDLINE", "ARCHIVE"})

Verdict = Literal["ok", "warn", "bad", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check of `doctor`."""

    check: str
    """Name of the check. It is stable: scripts select by it."""

    verdict: Verdict
    says: str
    """Description of what was found, for people."""

    todo: str = ""
    """Advice on what to do about it."""


def judge_bucket(settings: Mapping[str, Any], prefix: str) -> list[Finding]:
    """Judge each setting that matters to a root.

    Args:
        settings: The bucket, as the JSON API returns it.
        prefix: The root's path in the bucket.

    Returns:
        One finding for each setting.

    """
    return [
        _lifecycle(settings, prefix),
        _soft_delete(settings),
        _versioning(settings),
        _holds(settings),
        _storage_class(settings),
    ]


def _lifecycle(settings: Mapping[str, Any], prefix: str) -> Finding:
    rules = settings.get("lifecycle", {}).get("rule", [])
    deleting = [rule for rule in rules if _action(rule) == "Delete" and _reaches(rule, prefix)]
    moving = [rule for rule in rules if _action(rule) == "SetStorageClass" and _reaches(rule, prefix)]
    aborting = any(_action(rule) == "AbortIncompleteMultipartUpload" for rule in rules)
    if deleting:
        return Finding(
            check="lifecycle",
            verdict="bad",
            says=f"a lifecycle rule deletes objects of this root: {deleting[0].get('condition')}",
            todo="take the rule away, or give it a matchesPrefix elsewhere: the log may never lose an object",
        )
    if moving:
        return Finding(
            check="lifecycle",
            verdict="warn",
            says=f"a lifecycle rule moves objects of this root to {moving[0]['action'].get('storageClass')}",
            todo="leave the log and recent checkpoints in STANDARD: reading and deleting early cost extra elsewhere",
        )
    if not aborting:
        return Finding(
            check="lifecycle",
            verdict="ok",
            says="no rule touches this root; none ends uploads that were broken off",
            todo="a rule AbortIncompleteMultipartUpload (age 7) frees what other clients' broken uploads hold",
        )
    return Finding(check="lifecycle", verdict="ok", says="no rule deletes or moves objects of this root")


def _soft_delete(settings: Mapping[str, Any]) -> Finding:
    kept_s = int(settings.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))
    if not kept_s:
        return Finding(check="soft-delete", verdict="ok", says="off: deleted checkpoints cost nothing more")
    return Finding(
        check="soft-delete",
        verdict="warn",
        says=f"deleted checkpoints are kept, and billed, for {age_text(kept_s)} more",
        todo="gcloud storage buckets update --clear-soft-delete, unless you want to be able to undelete",
    )


def _versioning(settings: Mapping[str, Any]) -> Finding:
    if not settings.get("versioning", {}).get("enabled"):
        return Finding(check="versioning", verdict="ok", says="off")
    return Finding(
        check="versioning",
        verdict="warn",
        says="deleted checkpoints stay as noncurrent versions, and are billed",
        todo="turn versioning off, or add a rule that deletes noncurrent versions (isLive false)",
    )


def _holds(settings: Mapping[str, Any]) -> Finding:
    seconds = int(settings.get("retentionPolicy", {}).get("retentionPeriod", 0))
    if not seconds and not settings.get("defaultEventBasedHold"):
        return Finding(check="retention-policy", verdict="ok", says="none: what is deleted can go")
    return Finding(
        check="retention-policy",
        verdict="warn",
        says="the bucket refuses to delete objects"
        + (f" younger than {age_text(seconds)}" if seconds else " under a hold"),
        todo="use a bucket without it: deletion of checkpoints will fail and their data pile up",
    )


def _storage_class(settings: Mapping[str, Any]) -> Finding:
    found = str(settings.get("storageClass", "STANDARD"))
    place = f"{found} in {settings.get('location', 'an unknown location')}"
    if found not in _COLD:
        return Finding(
            check="storage-class",
            verdict="ok",
            says=place,
            todo="the accelerators should be in that location, else every byte crosses regions",
        )
    return Finding(
        check="storage-class",
        verdict="warn",
        says=f"{place}: deleting a checkpoint early and reading it cost extra",
        todo="use a STANDARD bucket for roots that are written to",
    )


def _action(rule: Mapping[str, Any]) -> str:
    return str(rule.get("action", {}).get("type", ""))


def _reaches(rule: Mapping[str, Any], prefix: str) -> bool:
    """Tell whether the rule may apply to live objects of a root under `prefix`."""
    condition = rule.get("condition", {})
    if (
        condition.get("isLive") is False
        or "numNewerVersions" in condition
        or "daysSinceNoncurrentTime" in condition
    ):
        return False
    suffixes = condition.get("matchesSuffix")
    if suffixes and not any(name.endswith(tuple(suffixes)) for name in _NAMES):
        return False
    prefixes = condition.get("matchesPrefix")
    root = f"{prefix}/" if prefix else ""
    return not prefixes or any(root.startswith(each) or each.startswith(root) for each in prefixes)
