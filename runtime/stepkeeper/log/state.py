"""Compute the state of the log after each entry. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from stepkeeper.errors import LogFormatError, RestoreError
from stepkeeper.log.entries import (
    BeginEntry,
    Body,
    CommitEntry,
    DeleteEntry,
    QuarantineEntry,
    RestoredEntry,
    VoidEntry,
)
from stepkeeper.log.records import CommitRecord, ForeignBase, Owner

__all__ = ["LogState", "apply_body", "quarantine_commit", "remove_commits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """The state of a log after some entry. `root`, `head` and `claim` are those that `StateAfter` describes."""

    tail: int = -1
    """The greatest slot; -1 if the log is empty."""

    root: str | None = None
    head: int | None = None
    claim: int | None = None
    commits: Mapping[int, CommitRecord] = field(default_factory=dict)
    """The live and quarantined commits by slot, in the order of slots."""

    legacy: ForeignBase | None = None
    """The step of another writer that is the latest, if HEAD is no commit."""

    branching: bool = False
    """True if the next commit begins a branch: it has no parent, and HEAD's line is abandoned."""

    owner: Owner | None = None
    """The owner of the last begin."""

    host: str = ""
    """The host of the last begin."""

    owners: Mapping[str, Owner] = field(default_factory=dict)
    index: int = -1
    """The slot of the newest entry with an index; -1 if the log is empty."""

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
        """The next commit's parent, and the other writer's step that it continues from; neither for a branch."""
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

    def continues_from(self, base: int | ForeignBase) -> bool:
        """Return True if `base` is what HEAD means, and the next commit continues from it."""
        if self.branching:
            return False
        if isinstance(base, int):
            return self.head == base
        return self.head is None and self.legacy is not None and self.legacy.folder == base.folder

    def commit_in(self, folder: str) -> CommitRecord | None:
        """Find the commit whose data is in `folder`: a save without an answer may be in the log."""
        return next((record for record in self.commits.values() if record.folder == folder), None)


def apply_body(state: LogState, slot: int, claim: int, nonce: str, body: Body) -> LogState:
    """Compute the state after `body`. Raises LogFormatError if it contradicts the earlier entries."""
    if not isinstance(body, BeginEntry) and claim != state.claim:
        raise LogFormatError(f"slot {slot} is of claim {claim}, but claim {state.claim} owns the log there")
    moved = replace(state, tail=slot, root=nonce if state.root is None else state.root)
    match body:
        case BeginEntry():
            return _apply_begin(moved, slot, body)
        case CommitEntry():
            return _apply_commit(moved, slot, claim, body)
        case DeleteEntry():
            return remove_commits(moved, body.commits, slot)
        case QuarantineEntry():
            return quarantine_commit(moved, _record(moved, body.commit, slot), slot)
        case RestoredEntry():
            record = replace(_record(moved, body.commit, slot), verified=True)
            return replace(moved, commits={**moved.commits, record.slot: record})
        case VoidEntry():
            return moved


def _apply_begin(state: LogState, slot: int, body: BeginEntry) -> LogState:
    if body.base is not None:
        _record(state, body.base, slot)
        if body.legacy is not None:
            raise LogFormatError(
                f"slot {slot} continues from two bases, commit {body.base} and {body.legacy}"
            )
    if body.branch and (body.base is not None or body.legacy is not None or body.scratch):
        raise LogFormatError(f"slot {slot} begins a branch, but also continues from a base")
    owners = dict(state.owners)
    if body.owner is not None:
        # It becomes the last one: owners are in the order of their last begins.
        owners.pop(body.owner.uid, None)
        owners[body.owner.uid] = body.owner
    begun = replace(
        state, claim=slot, owner=body.owner, host=body.host, owners=owners, branching=bool(body.branch)
    )
    return begun if body.branch else replace(begun, head=body.base, legacy=body.legacy)


def _apply_commit(state: LogState, slot: int, claim: int, body: CommitEntry) -> LogState:
    parent, legacy = state.next_base
    if body.parent != parent:
        raise LogFormatError(
            f"slot {slot} has parent {body.parent}, but the log continues from {parent} there"
        )
    if body.legacy != legacy:
        raise LogFormatError(f"slot {slot} continues from {body.legacy}, but the log from {legacy} there")
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


def quarantine_commit(state: LogState, record: CommitRecord, slot: int) -> LogState:
    """Take `record` off every line, as a quarantine at `slot` does, and keep it as quarantined."""
    without_it = remove_commits(state, (record.slot,), slot)
    kept = replace(record, quarantined=True)
    return replace(without_it, commits=dict(sorted({**without_it.commits, record.slot: kept}.items())))


def remove_commits(state: LogState, gone: Collection[int], slot: int) -> LogState:
    """Take these commits out of the state and off every line: their children move to their parents."""
    for commit in gone:
        if commit not in state.commits:
            raise LogFormatError(f"slot {slot} names commit {commit}, which doesn't exist")
    taken = frozenset(gone)
    left = {commit: record for commit, record in state.commits.items() if commit not in taken}
    for record in [each for each in left.values() if each.parent in taken]:
        parent, legacy = _find_live_base(state, record.parent, record.legacy, taken)
        left[record.slot] = replace(record, parent=parent, legacy=legacy)
    head, legacy = _find_live_base(state, state.head, state.legacy, taken)
    return replace(state, head=head, legacy=legacy, commits=left)


def _find_live_base(
    state: LogState, commit: int | None, legacy: ForeignBase | None, gone: Collection[int]
) -> tuple[int | None, ForeignBase | None]:
    """Find the nearest ancestor of `commit`, or itself, that isn't gone; else the other writer's step before them."""
    while commit is not None and commit in gone:
        below = state.commits[commit]
        commit, legacy = below.parent, below.legacy
    return commit, legacy
