"""Judge a bucket's settings for a root in it. Pure."""

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
    summary: str
    """Description of the finding, for people."""

    todo: str = ""
    """Advice on what to do about it."""


def judge_bucket(settings: Mapping[str, Any], prefix: str) -> list[Finding]:
    """Judge each setting of a bucket, as the JSON API returns it, that matters to a root at `prefix`."""
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
            summary=f"a lifecycle rule deletes objects of this root: {deleting[0].get('condition')}",
            todo="remove the rule, or limit it to other paths with matchesPrefix: the log must never lose an object",
        )
    if moving:
        return Finding(
            check="lifecycle",
            verdict="warn",
            summary=f"a lifecycle rule moves objects of this root to {moving[0]['action'].get('storageClass')}",
            todo="keep the log and recent checkpoints in STANDARD: elsewhere reads and early deletion cost extra",
        )
    if not aborting:
        return Finding(
            check="lifecycle",
            verdict="ok",
            summary="no rule touches this root; none aborts incomplete uploads",
            todo="a rule AbortIncompleteMultipartUpload (age 7) frees the space of other clients' incomplete uploads",
        )
    return Finding(check="lifecycle", verdict="ok", summary="no rule deletes or moves objects of this root")


def _soft_delete(settings: Mapping[str, Any]) -> Finding:
    kept_s = int(settings.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))
    if not kept_s:
        return Finding(check="soft-delete", verdict="ok", summary="off: deleted checkpoints cost nothing")
    return Finding(
        check="soft-delete",
        verdict="warn",
        summary=f"deleted checkpoints are kept and billed for {age_text(kept_s)}",
        todo="run gcloud storage buckets update --clear-soft-delete, unless you want to be able to undelete",
    )


def _versioning(settings: Mapping[str, Any]) -> Finding:
    if not settings.get("versioning", {}).get("enabled"):
        return Finding(check="versioning", verdict="ok", summary="off")
    return Finding(
        check="versioning",
        verdict="warn",
        summary="deleted checkpoints stay as noncurrent versions and are billed",
        todo="turn versioning off, or add a rule that deletes noncurrent versions (isLive false)",
    )


def _holds(settings: Mapping[str, Any]) -> Finding:
    seconds = int(settings.get("retentionPolicy", {}).get("retentionPeriod", 0))
    if not seconds and not settings.get("defaultEventBasedHold"):
        return Finding(check="retention-policy", verdict="ok", summary="none: objects can be deleted")
    return Finding(
        check="retention-policy",
        verdict="warn",
        summary="the bucket refuses to delete objects"
        + (f" younger than {age_text(seconds)}" if seconds else " under a hold"),
        todo="use a bucket without it: otherwise checkpoints can't be deleted, and their data accumulates",
    )


def _storage_class(settings: Mapping[str, Any]) -> Finding:
    found = str(settings.get("storageClass", "STANDARD"))
    place = f"{found} in {settings.get('location', 'an unknown location')}"
    if found not in _COLD:
        return Finding(
            check="storage-class",
            verdict="ok",
            summary=place,
            todo="run the accelerators in that location; otherwise every byte crosses regions",
        )
    return Finding(
        check="storage-class",
        verdict="warn",
        summary=f"{place}: reads and early deletion cost extra",
        todo="use a STANDARD bucket for roots that jobs write to",
    )


def _action(rule: Mapping[str, Any]) -> str:
    return str(rule.get("action", {}).get("type", ""))


def _reaches(rule: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the rule may apply to live objects of a root under `prefix`."""
    condition = rule.get("condition", {})
    of_noncurrent = {"numNewerVersions", "daysSinceNoncurrentTime"} & condition.keys()
    if of_noncurrent or condition.get("isLive") is False:
        return False
    suffixes = condition.get("matchesSuffix")
    if suffixes and not any(name.endswith(tuple(suffixes)) for name in _NAMES):
        return False
    prefixes = condition.get("matchesPrefix")
    root = f"{prefix}/" if prefix else ""
    return not prefixes or any(root.startswith(each) or each.startswith(root) for each in prefixes)
