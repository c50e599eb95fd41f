"""Replay those entries of a damaged log that can be read. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from stepkeeper.errors import LogFormatError
from stepkeeper.log.entries import (
    BeginEntry,
    CommitEntry,
    DeleteEntry,
    Entry,
    QuarantineEntry,
    RestoredEntry,
    VoidEntry,
)
from stepkeeper.log.indexes import overlaid, relinked
from stepkeeper.log.records import CommitRecord
from stepkeeper.log.state import LogState, quarantined, without
from stepkeeper.repair.evidence import FoundSave

__all__ = ["PartialReplay", "record_of"]


class PartialReplay:
    """Compute what the entries after an index mean if some of them can't be read."""

    def __init__(self, state: LogState, lost: Collection[int], assigned: Mapping[int, FoundSave]) -> None:
        """Start from a state.

        Args:
            state: The state after the entry with the index; an empty one if no index can be read.
            lost: The slots after it that can't be read.
            assigned: The saves that some of those have committed.

        """
        self.state = state
        self._lost, self._assigned = frozenset(lost), assigned

    def read(self, slot: int, entry: Entry | None) -> None:
        """Read the next slot; `entry` is None if it can't be read. Raises LogFormatError for a contradiction."""
        if entry is None:
            self._pass_over(slot)
            return
        if isinstance(entry.body, BeginEntry):
            self._begin(slot, entry, entry.body)
        else:
            self._read_in_claim(slot, entry)
        if entry.index is not None:
            # Its base can't be read, so it isn't all. But what it says is as it was after this entry.
            state = overlaid(self.state, slot, entry, entry.index)
            state, _ = relinked(self._with_known_head(state), self.state)
            self.state = self._with_known_parents(state)

    def _begin(self, slot: int, entry: Entry, body: BeginEntry) -> None:
        owners = dict(self.state.owners)
        if body.owner is not None:
            owners.pop(body.owner.uid, None)
            owners[body.owner.uid] = body.owner
        self.state = replace(
            self.state,
            tail=slot,
            root=entry.after.root,
            claim=slot,
            owner=body.owner,
            host=body.host,
            owners=owners,
            branching=bool(body.branch),
        )
        if not body.branch:
            self._go_to(slot, body.base, begun=True)
            self.state = replace(self.state, legacy=body.legacy) if body.base is None else self.state

    def _read_in_claim(self, slot: int, entry: Entry) -> None:
        begun = entry.claim != self.state.claim
        if begun and entry.claim not in self._lost:
            raise LogFormatError(f"slot {slot} is of claim {entry.claim}, which is no begin")
        branching = self.state.branching and not begun
        self.state = replace(
            self.state, tail=slot, root=entry.after.root, claim=entry.claim, branching=branching
        )
        if isinstance(entry.body, CommitEntry):
            if not self._begins_branch(entry.body, entry.claim):
                self._go_to(slot, entry.body.parent, begun=begun)
            self._commit(slot, entry.claim, entry.body)
        else:
            self._change_commits(slot, entry)
            self._go_to(slot, entry.after.head, begun=begun)

    def _with_known_head(self, state: LogState) -> LogState:
        """Let HEAD be where it was if the commit isn't known: that is the nearest one that is."""
        if state.head is None or state.head in state.commits:
            return state
        known = self.state.head if self.state.head in state.commits else None
        return replace(state, head=known)

    def _with_known_parents(self, state: LogState) -> LogState:
        """Let commits go on from the nearest one that is known, as far as that is known from before the index."""
        before, found = self.state.commits, dict(state.commits)
        for record in state.commits.values():
            if record.parent is None or record.parent in state.commits:
                continue
            near = before.get(record.slot) or next(
                (
                    before[each.slot]
                    for each in found.values()
                    if each.parent == record.slot and each.slot in before
                ),
                None,
            )
            parent = None if near is None or near.parent not in state.commits else near.parent
            found[record.slot] = replace(record, parent=parent)
        return replace(state, commits=found)

    def _pass_over(self, slot: int) -> None:
        claim = 0 if slot == 0 else self.state.claim
        self.state = replace(self.state, tail=slot, claim=claim)
        if slot in self._assigned:
            self._add(record_of(slot, self._assigned[slot], self.state))

    def _begins_branch(self, body: CommitEntry, claim: int) -> bool:
        """Tell whether the commit has no parent because it begins a branch: what HEAD was is left behind, not bad.

        A claim whose begin can't be read may have begun one.
        """
        if body.parent is not None or body.legacy is not None:
            return False
        if claim in self._lost and self.state.head is not None:
            self.state = replace(self.state, branching=True)
        return self.state.branching

    def _go_to(self, slot: int, head: int | None, *, begun: bool) -> None:
        """Move HEAD to where it was. `begun`: an entry that can't be read was a begin, and may have moved it there."""
        if head == self.state.head:
            return
        if head is not None and head not in self.state.commits:
            if head not in self._lost:
                raise LogFormatError(f"slot {slot} names commit {head}, which isn't there")
            # It was a commit, but of which save isn't known. HEAD stays at the nearest commit that is; if the lost one
            # began a branch, the commits after it are on that branch all the same.
            return
        # Within a claim HEAD moves back only over commits that are no longer live.
        while not begun and self.state.head is not None and self.state.head != head:
            self.state = quarantined(self.state, self.state.commits[self.state.head], slot)
        if self.state.head != head:
            self.state = replace(self.state, head=head, legacy=None)

    def _commit(self, slot: int, claim: int, body: CommitEntry) -> None:
        parent, legacy = self.state.next_base
        self._add(
            CommitRecord(
                slot=slot,
                claim=claim,
                step=body.step,
                folder=body.folder,
                size_bytes=body.size_bytes,
                manifest=body.manifest,
                parent=parent,
                legacy=None if parent is not None else body.legacy or legacy,
                metrics=body.metrics,
            )
        )

    def _add(self, record: CommitRecord) -> None:
        commits = {**self.state.commits, record.slot: record}
        self.state = replace(self.state, head=record.slot, legacy=None, branching=False, commits=commits)

    def _change_commits(self, slot: int, entry: Entry) -> None:
        """Apply what the entry says of commits, of those that are known."""
        commits = self.state.commits
        match entry.body:
            case DeleteEntry():
                for commit in entry.body.commits:
                    if commit in commits:
                        self.state = without(self.state, (commit,), slot)
            case QuarantineEntry() if entry.body.commit in commits:
                self.state = quarantined(self.state, commits[entry.body.commit], slot)
            case RestoredEntry() if entry.body.commit in commits:
                record = replace(commits[entry.body.commit], verified=True)
                self.state = replace(self.state, commits={**commits, record.slot: record})
            case _:
                assert isinstance(entry.body, RestoredEntry | QuarantineEntry | VoidEntry)


def record_of(slot: int, save: FoundSave, state: LogState) -> CommitRecord:
    """Make the record of a commit whose entry can't be read, as the next one of the line."""
    parent, legacy = state.next_base
    return CommitRecord(
        slot=slot,
        claim=save.claim,
        step=save.step,
        folder=save.folder,
        size_bytes=save.size_bytes,
        manifest=save.manifest,
        parent=parent,
        legacy=None if parent is not None else legacy,
    )
