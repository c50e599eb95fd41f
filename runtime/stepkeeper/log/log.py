"""Append the entries of a claim to the log: begin, commit, restored, quarantine, delete, void."""

from collections.abc import Callable, Sequence
from typing import final

from stepkeeper.contract import Identity
from stepkeeper.errors import FencedError, RefusedError
from stepkeeper.log.appending import Appender, PendingAppend
from stepkeeper.log.claims import Claim, begin_body, check_claim, check_owner, owner_of, resolve_base
from stepkeeper.log.entries import (
    BeginEntry,
    Body,
    CommitEntry,
    DeleteEntry,
    QuarantineEntry,
    RestoredEntry,
    VoidEntry,
)
from stepkeeper.log.records import CommitRecord, ForeignBase, ManifestRef, Owner
from stepkeeper.log.replay import apply_entry, entry_for
from stepkeeper.log.state import LogState

__all__ = ["Log"]


@final
class Log(Appender):
    """Read the log of a root, and append to it. One thread at a time may use it.

    Call `open` or `refresh` before reading. Appending needs a claim, from `begin` or `resume`.
    """

    def begin(
        self,
        identity: Identity | Owner | None = None,
        *,
        base: int | ForeignBase | None = None,
        offer: Callable[[], ForeignBase | None] = lambda: None,
        scratch: bool = False,
        branch: bool = False,
        take_over: str | bool | None = None,
        host: str = "",
        after: Claim | None = None,
        nonce: str | None = None,
    ) -> Claim:
        """Claim the root. Every earlier claim is stale from then on.

        Args:
            identity: The job that claims, or an owner as the log knows it; None for a process that was started by hand.
            base: What HEAD is from then on: a commit's slot or another writer's step. Without it, HEAD stays
                what it was, or becomes nothing if `scratch`.
            offer: Called if nothing is committed yet; returns another writer's step to continue from.
            scratch: Start from scratch.
            branch: Let the next commit begin a branch; HEAD stays what it was until then.
            take_over: Name of the job to take the root over from; True for any job.
            host: This process's host, for people.
            after: A claim that must still hold. It stays the claim if HEAD is `base` already.
            nonce: The entry's nonce. A second call with the same nonce, from any process, returns the same claim.

        Raises:
            FencedError: A later start of the same job has claimed the root, or `after` no longer holds.
            OtherJobsRootError: The root belongs to another job, and `take_over` doesn't free it.
            RestoreError: `base` isn't live, or HEAD is nothing because commits were condemned.
        """
        owner = identity if isinstance(identity, Owner) else owner_of(identity)

        def build(state: LogState) -> Body | None:
            if after is not None:
                check_claim(state, after)
                if base is not None and state.continues_from(base):
                    return None  # `after` stays the claim
            check_owner(state, owner, take_over)
            if branch:
                return BeginEntry(branch=True, owner=owner, host=host)
            # A training that began from scratch, and has committed nothing, does so again at its next start.
            from_scratch = base is None and (scratch or self._began_from_scratch(state))
            found = resolve_base(state, base, scratch=from_scratch, offer=offer)
            return begin_body(found, owner, host, scratch=from_scratch)

        begun = self.open().claim
        if nonce is not None and begun is not None and self.entry(begun).nonce == nonce:
            return Claim(slot=begun, nonce=nonce)
        entry = self._append(None, build, nonce)
        if entry is None:
            assert after is not None
            return after
        return Claim(slot=entry.claim, nonce=entry.nonce)

    def repair(self, state: LogState, body: BeginEntry, nonce: str) -> Claim:
        """Append a begin whose index replaces all entries before it, because some can't be read.

        `state` is what is known of the log. Raises RefusedError if another process has written the next slot.
        """
        self.settle()
        self._state = state
        entry = entry_for(state, body, claim=None, nonce=nonce)
        winner = self._place(PendingAppend(claim=None, build=lambda _: body, nonce=nonce, entry=entry))
        if winner.nonce != nonce:
            self._state = LogState()  # `state` lacks that entry
            raise RefusedError(
                f"slot {state.tail + 1} of {self._store.uri} was written just now: a job is saving there. Stop it first"
            )
        self._state = apply_entry(state, state.tail + 1, winner)
        return Claim(slot=winner.claim, nonce=nonce)

    def resume(self, claim: Claim) -> LogState:
        """Read the state, and check that `claim` is of this log and still holds. Raises FencedError."""
        self.open()
        check_claim(self._state, claim)
        if self.entry(claim.slot).nonce != claim.nonce:
            raise FencedError(
                f"slot {claim.slot} is another process's claim: this is the log of another root"
            )
        return self._state

    def latest(self, claim: Claim) -> CommitRecord | None:
        """Read which commit HEAD names, if any, and check that `claim` still holds.

        Raises FencedError, or RestoreError if HEAD is nothing because commits were condemned.
        """
        state = self.resume(claim)
        base = resolve_base(state, None, scratch=self._began_from_scratch(state))
        return state.commits[base] if isinstance(base, int) else None

    def commit(
        self,
        claim: Claim,
        *,
        step: int,
        folder: str,
        size_bytes: int,
        manifest: ManifestRef,
        metrics: dict[str, str] | None = None,
    ) -> CommitRecord:
        """Commit the checkpoint in `folder`, which is durable already. It is HEAD from then on.

        Nothing is committed after FencedError or StorageError; UnknownOutcomeError: call `settle` or `void`
        to find out.
        """

        def build(state: LogState) -> Body:
            parent, legacy = state.next_base
            return CommitEntry(
                step=step,
                folder=folder,
                size_bytes=size_bytes,
                manifest=manifest,
                parent=parent,
                legacy=legacy,
                metrics=metrics,
            )

        self._append(claim, build)
        return self._state.commits[self._state.tail]

    def mark_restored(self, claim: Claim, commit: int) -> None:
        """Record in the log that all ranks have read all of `commit`."""
        self._append(claim, lambda state: RestoredEntry(commit=state.live_commit(commit).slot))

    def quarantine(self, claim: Claim, commit: int, reason: str) -> CommitRecord | None:
        """Quarantine `commit`, and return the commit that HEAD names now."""
        self._append(
            claim, lambda state: QuarantineEntry(commit=state.live_commit(commit).slot, reason=reason)
        )
        return self._state.latest

    def delete(self, claim: Claim, choose: Callable[[LogState], Sequence[int]]) -> tuple[CommitRecord, ...]:
        """Delete the commits that `choose` picks, and return them. Their data may be removed from then on.

        `choose` is called again whenever the state has changed. If it picks nothing, nothing is appended.
        """
        chosen: tuple[CommitRecord, ...] = ()

        def build(state: LogState) -> Body | None:
            nonlocal chosen
            chosen = tuple(state.commits[slot] for slot in choose(state))
            return DeleteEntry(commits=tuple(record.slot for record in chosen)) if chosen else None

        self._append(claim, build)
        return chosen

    def void(self, claim: Claim, reason: str, folder: str) -> CommitRecord | None:
        """Give up the save in `folder` so that it can't become a commit, or return the commit that it is.

        The answer is certain even in a new process while its predecessor's commit may still arrive.
        """
        append = PendingAppend(
            claim=claim,
            build=lambda state: None if state.commit_in(folder) else VoidEntry(reason=reason, folder=folder),
            unknown=self._pending is not None,
        )
        # The void goes to the slot of the entry that had no answer: only one of them gets it.
        self._pending = None
        self._run(append)
        return self._state.commit_in(folder)

    def _began_from_scratch(self, state: LogState) -> bool:
        """Return True if the last begin started from scratch, and nothing was committed since."""
        if state.head is not None or state.legacy is not None or state.claim is None:
            return False
        if state.commits and max(state.commits) > state.claim:
            return False  # a commit followed, and was condemned
        body = self.entry(state.claim).body
        return isinstance(body, BeginEntry) and bool(body.scratch)
