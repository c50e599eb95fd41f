"""Replay the log: compute what its entries mean in their order. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from stepkeeper.errors import LogFormatError, RestoreError
from stepkeeper.log.entries import (
    BeginEntry,
    Body,
    CommitEntry,
    DeleteEntry,
    Entry,
    QuarantineEntry,
    RestoredEntry,
    VoidEntry,
)
from stepkeeper.log.records import CommitRecord, ForeignBase, Index, Owner, StateAfter

__all__ = ["CommitRecord", "LogState", "apply", "entry_for", "from_index", "quarantined", "without"]

_INDEX_EVERY: Final = 16
"""The most entries that are read to open a log, whatever its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The state of a log after some entry."""

    tail: int = -1
    """The greatest slot; -1 if the log is empty."""

    root: str | None = None
    head: int | None = None
    claim: int | None = None
    index: int = -1
    commits: Mapping[int, CommitRecord] = field(default_factory=dict)
    """The live and quarantined commits by slot, in the order of slots."""

    legacy: ForeignBase | None = None
    """The step of another writer that Latest means, if HEAD is no commit."""

    branching: bool = False
    """True if the next commit begins a branch: it has no parent, and HEAD's line is abandoned."""

    owner: Owner | None = None
    """The owner of the last begin."""

    host: str = ""
    """The host of the last begin."""

    owners: Mapping[str, Owner] = field(default_factory=dict)

    @property
    def live(self) -> tuple[CommitRecord, ...]:
        """The commits that are not quarantined."""
        return tuple(record for record in self.commits.values() if not record.quarantined)

    @property
    def latest(self) -> CommitRecord | None:
        """The commit that HEAD names."""
        return None if self.head is None else self.commits[self.head]

    @property
    def next_base(self) -> tuple[int | None, ForeignBase | None]:
        """The next commit's parent, and the other writer's step that it goes on from; neither if it begins a branch."""
        return (None, None) if self.branching else (self.head, self.legacy)

    @property
    def line(self) -> tuple[CommitRecord, ...]:
        """HEAD and its live ancestors, newest first."""
        found = []
        slot = self.head
        while slot is not None:
            found.append(self.commits[slot])
            slot = self.commits[slot].parent
        return tuple(found)

    def live_commit(self, slot: int) -> CommitRecord:
        """Find a live commit by its slot. Raises RestoreError, which lists the live commits."""
        record = self.commits.get(slot)
        if record is None or record.quarantined:
            there = ", ".join(f"{r.slot} (step {r.step})" for r in self.live) or "none"
            state = "is quarantined" if record else "doesn't exist or was deleted"
            raise RestoreError(f"commit {slot} {state}; live commits: {there}")
        return record

    def stands_on(self, base: int | ForeignBase) -> bool:
        """Tell whether `base` is what HEAD means, and what the next commit goes on from."""
        if self.branching:
            return False
        if isinstance(base, int):
            return self.head == base
        return self.head is None and self.legacy is not None and self.legacy.folder == base.folder

    def commit_in(self, folder: str) -> CommitRecord | None:
        """Find the commit whose data is in `folder`.

        So one learns whether a save that got no answer is in the log.
        """
        return next((record for record in self.commits.values() if record.folder == folder), None)


def entry_for(state: LogState, body: Body, *, claim: int | None, nonce: str) -> Entry:
    """Make the entry that says `body` in the slot after `state`; `claim` is None for a begin."""
    slot = state.tail + 1
    writer = slot if claim is None else claim
    after = _applied(state, slot, writer, nonce, body)
    indexed = isinstance(body, BeginEntry) or slot - state.index >= _INDEX_EVERY
    return Entry(
        claim=writer,
        nonce=nonce,
        body=body,
        after=_after(after, index=slot if indexed else state.index),
        index=_index(after) if indexed else None,
    )


def apply(state: LogState, slot: int, entry: Entry) -> LogState:
    """Compute the state with `entry` at `slot`. Raises LogFormatError if the entry contradicts those before it."""
    if state.tail < 0 < slot:
        # The log was opened in the middle: an index stands for all entries before it.
        return from_index(slot, entry)
    if slot != state.tail + 1:
        raise LogFormatError(f"slot {slot} read after slot {state.tail}")
    if isinstance(entry.body, BeginEntry) and entry.body.lost is not None:
        # A repair: what it could prove counts, also for who had read an entry before it was damaged.
        return _repaired(state, slot, entry, entry.body.lost)
    index = slot if entry.index is not None else state.index
    after = replace(_applied(state, slot, entry.claim, entry.nonce, entry.body), index=index)
    if _after(after, index=index) != entry.after or (entry.index and _index(after) != entry.index):
        raise LogFormatError(
            f"slot {slot} says {entry.after} after itself; the entries before it make it {_after(after, index=index)}"
        )
    return after


def _after(state: LogState, *, index: int) -> StateAfter:
    if state.root is None or state.claim is None:
        raise LogFormatError("the first entry of a log is a begin")
    return StateAfter(root=state.root, claim=state.claim, index=index, head=state.head)


def _index(state: LogState) -> Index:
    return Index(
        commits=tuple(state.commits.values()),
        owners=tuple(state.owners.values()),
        owner=state.owner,
        host=state.host,
        legacy=state.legacy,
        branching=state.branching or None,
    )


def from_index(slot: int, entry: Entry) -> LogState:
    """Make the state after the entry at `slot` from its index. Raises LogFormatError if it has none."""
    if entry.index is None or entry.after.index != slot:
        raise LogFormatError(f"slot {slot} carries no index")
    return LogState(
        tail=slot,
        root=entry.after.root,
        head=entry.after.head,
        claim=entry.after.claim,
        index=slot,
        commits={record.slot: record for record in entry.index.commits},
        legacy=entry.index.legacy,
        branching=bool(entry.index.branching),
        owner=entry.index.owner,
        host=entry.index.host,
        owners={owner.uid: owner for owner in entry.index.owners},
    )


def _repaired(state: LogState, slot: int, entry: Entry, lost: Collection[int]) -> LogState:
    # The root's name is the nonce of slot 0. If nothing that names it could be read, it got another one.
    if state.root is not None and entry.after.root != state.root and 0 not in lost:
        raise LogFormatError(f"slot {slot} repairs the root {entry.after.root}, but this is {state.root}")
    return from_index(slot, entry)


def _applied(state: LogState, slot: int, claim: int, nonce: str, body: Body) -> LogState:
    if not isinstance(body, BeginEntry) and claim != state.claim:
        raise LogFormatError(f"slot {slot} is of claim {claim}, but claim {state.claim} owns the log there")
    moved = replace(state, tail=slot, root=nonce if state.root is None else state.root)
    match body:
        case BeginEntry():
            return _begun(moved, slot, body)
        case CommitEntry():
            return _committed(moved, slot, claim, body)
        case DeleteEntry():
            for commit in body.commits:
                moved = without(moved, commit, slot)
            return moved
        case QuarantineEntry():
            return quarantined(moved, _record(moved, body.commit, slot), slot)
        case RestoredEntry():
            record = replace(_record(moved, body.commit, slot), verified=True)
            return replace(moved, commits={**moved.commits, record.slot: record})
        case VoidEntry():
            return moved


def _begun(state: LogState, slot: int, body: BeginEntry) -> LogState:
    if body.base is not None:
        _record(state, body.base, slot)
        if body.legacy is not None:
            raise LogFormatError(f"slot {slot} goes on from two things, commit {body.base} and {body.legacy}")
    if body.branch and (body.base is not None or body.legacy is not None or body.scratch):
        raise LogFormatError(f"slot {slot} begins a branch, and goes on from something too")
    owners = dict(state.owners)
    if body.owner is not None:
        owners.pop(body.owner.uid, None)
        owners[body.owner.uid] = body.owner
    begun = replace(
        state, claim=slot, owner=body.owner, host=body.host, owners=owners, branching=bool(body.branch)
    )
    return begun if body.branch else replace(begun, head=body.base, legacy=body.legacy)


def _committed(state: LogState, slot: int, claim: int, body: CommitEntry) -> LogState:
    parent, legacy = state.next_base
    if body.parent != parent:
        raise LogFormatError(f"slot {slot} has parent {body.parent}, but the log goes on from {parent} there")
    if body.legacy != legacy:
        raise LogFormatError(f"slot {slot} goes on from {body.legacy}, but the log from {legacy} there")
    record = CommitRecord(
        slot=slot,
        claim=claim,
        step=body.step,
        folder=body.folder,
        size_bytes=body.size_bytes,
        manifest=body.manifest,
        parent=body.parent,
        legacy=body.legacy,
        metrics=body.metrics,
    )
    return replace(state, head=slot, legacy=None, branching=False, commits={**state.commits, slot: record})


def _record(state: LogState, commit: int, slot: int) -> CommitRecord:
    record = state.commits.get(commit)
    if record is None or record.quarantined:
        raise LogFormatError(f"slot {slot} names commit {commit}, which isn't live there")
    return record


def quarantined(state: LogState, record: CommitRecord, slot: int) -> LogState:
    """Take `record` off every line, as a quarantine at `slot` does, and keep it as quarantined."""
    without_it = without(state, record.slot, slot)
    kept = replace(record, quarantined=True)
    return replace(without_it, commits=dict(sorted({**without_it.commits, record.slot: kept}.items())))


def without(state: LogState, commit: int, slot: int) -> LogState:
    """Take `commit` out of the state and off every line: its children, and HEAD, go on from its parent."""
    if commit not in state.commits:
        raise LogFormatError(f"slot {slot} names commit {commit}, which isn't there")
    gone = state.commits[commit]
    commits = {
        record.slot: replace(record, parent=gone.parent, legacy=gone.legacy)
        if record.parent == commit
        else record
        for record in state.commits.values()
        if record.slot != commit
    }
    if state.head == commit:
        state = replace(state, head=gone.parent, legacy=gone.legacy)
    return replace(state, commits=commits)
