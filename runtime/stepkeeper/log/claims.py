"""Decide which process may claim a root, and what the claim continues from. Pure."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from stepkeeper.contract import Identity
from stepkeeper.errors import FencedError, OtherJobsRootError, RestoreError
from stepkeeper.log.entries import BeginEntry
from stepkeeper.log.records import CommitRecord, ForeignBase, Owner
from stepkeeper.log.state import LogState

__all__ = [
    "Base",
    "Claim",
    "begin_body",
    "check_claim",
    "check_owner",
    "is_continued",
    "must_branch",
    "owner_of",
    "resolve_base",
]

Base = int | ForeignBase | None
"""The base that a begin continues from: a commit's slot, another writer's step, which the log calls legacy, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to append, until a later begin. It outlives the process that got it."""

    slot: int
    nonce: str


def check_claim(state: LogState, claim: Claim) -> None:
    """Check that `claim` is the last one in the log. Raises FencedError."""
    if state.claim != claim.slot:
        advice = "; stop one of the two, or give each its own root" if state.owner is None else ""
        raise FencedError(
            f"claim {claim.slot} is stale: slot {state.claim} has claimed the root for {_name_claimant(state)}{advice}"
        )


def _name_claimant(state: LogState) -> str:
    """Name the holder of the last claim: the job, its start, and the host."""
    owner = state.owner
    who = "a process started by hand" if owner is None else f"start {list(owner.ordinal)} of {owner.name}"
    return f"{who} on host {state.host}" if state.host else who


def check_owner(state: LogState, owner: Owner | None, take_over: str | bool | None) -> None:
    """Check that `owner` may claim the root. Raises FencedError or OtherJobsRootError."""
    if owner is not None:
        known = state.owners.get(owner.uid)
        if known is not None and known.ordinal > owner.ordinal:
            # An older start of the job may run a little longer. It must not take the root back.
            later = _name_claimant(state if known == state.owner else replace(state, owner=known, host=""))
            raise FencedError(f"{later} has claimed this root; this is the older start {list(owner.ordinal)}")
    last = state.owner
    if last is None or (owner is not None and owner.name == last.name):
        return
    if take_over is True or take_over == last.name:
        return
    raise OtherJobsRootError(
        f"this root belongs to {last.name}: {_name_claimant(state)} claimed it last; to continue with it under "
        f"{owner.name if owner else 'no job name'}, stop that job and pass "
        f"Options(take_over={last.name!r}) to the manager"
    )


def resolve_base(
    state: LogState, base: Base, *, scratch: bool, offer: Callable[[], ForeignBase | None] = lambda: None
) -> Base:
    """Find what a begin continues from: `base` if given, nothing if from scratch, else HEAD.

    If nothing is committed, that is the step of another writer that `offer` returns, or an earlier begin took. Raises
    RestoreError if `base` isn't live, or HEAD is nothing although there were commits.
    """
    if base is not None:
        return base if isinstance(base, ForeignBase) else state.live_commit(base).slot
    if scratch:
        return None
    if state.head is not None:
        return state.head
    if not state.commits:
        return offer() or state.legacy
    if state.legacy is not None:
        return state.legacy
    bad = ", ".join(f"{r.slot} (step {r.step})" for r in state.commits.values() if r.quarantined)
    live = ", ".join(f"{r.slot} (step {r.step})" for r in state.live)
    raise RestoreError(
        f"this root holds commits, but no latest one; quarantined: {bad or 'none'}; on abandoned branches: "
        f"{live or 'none'}. To continue from one of the live ones, call "
        "stepkeeper.log.Log(store).begin(base=SEQUENCE, take_over=True); to start training from scratch here, call "
        "begin(scratch=True); or use another root"
    )


def is_continued(restored: Collection[str] | None, saved: Collection[str]) -> bool:
    """Return True if a process has restored all that it saves: then it may continue HEAD at any step.

    `restored` has the names in the state that it has restored whole; None: nothing, or parts only.
    """
    return restored is not None and frozenset(restored) == frozenset(saved)


def must_branch(found: CommitRecord | ForeignBase | None, step: int) -> bool:
    """Return True if a process that continues no commit may save `step` only on a new branch.

    `found` is what HEAD meant when the process claimed the root; None if nothing was there.
    """
    return found is not None and step <= found.step


def begin_body(base: Base, owner: Owner | None, host: str, *, scratch: bool) -> BeginEntry:
    """Build the body of a begin that continues from `base`."""
    return BeginEntry(
        base=base if isinstance(base, int) else None,
        legacy=base if isinstance(base, ForeignBase) else None,
        scratch=scratch or None,
        owner=owner,
        host=host,
    )


def owner_of(identity: Identity | None) -> Owner | None:
    """Build the owner that stands for this process in the log; None if it was started by hand."""
    if identity is None or not identity.job_uid:
        return None
    return Owner(
        name=f"{identity.namespace}/{identity.job}",
        uid=identity.job_uid,
        jobset_number=identity.jobset_number,
        restart_attempt=identity.restart_attempt,
    )
