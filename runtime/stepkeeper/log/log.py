"""The log on a store: append, and what may be appended. For one thread at a time."""

from collections.abc import Callable, Sequence
from typing import final

from stepkeeper.contract import Identity
from stepkeeper.errors import FencedError
from stepkeeper.log.appending import Appender, Order
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
from stepkeeper.log.records import CommitRecord, ForeignBase, ManifestRef
from stepkeeper.log.state import LogState

__all__ = ["Log"]


@final
class Log(Appender):
    """Reading needs `open` (or `refresh`) first. Appending needs a claim, from `begin` or `resume`."""

    def begin(
        self,
        identity: Identity | None = None,
        *,
        base: int | ForeignBase | None = None,
        offer: Callable[[], ForeignBase | None] = lambda: None,
        scratch: bool = False,
        take_over: str | bool | None = None,
        host: str = "",
        after: Claim | None = None,
        nonce: str | None = None,
    ) -> Claim:
        """The root is claimed, every earlier claim stale. HEAD is `base`; without one as it was, or None if `scratch`.

        Where nothing is committed yet, `offer` is asked for another writer's step to go on from. With `after`, that
        claim must hold until then, and stays the claim if HEAD is `base` already. `nonce` is the entry's own: asked
        again with it, also by another process, the claim that came of it is the answer.

        Raises FencedError for an older start of the same job, OtherJobsRootError for a root of another name that
        `take_over` (True, or that name) doesn't free, RestoreError if `base` isn't live, or if HEAD is nothing
        because commits were condemned. Source: the log.
        """
        owner = owner_of(identity)

        def build(state: LogState) -> Body | None:
            if after is not None:
                check_claim(state, after)
                if base is not None and state.stands_on(base):
                    return None
            check_owner(state, owner, take_over)
            anew = base is None and (scratch or self._began_anew(state))
            found = resolve_base(state, base, scratch=anew, offer=offer)
            return begin_body(found, owner, host, anew=anew)

        begun = self.open().claim
        if nonce is not None and begun is not None and self.entry(begun).nonce == nonce:
            return Claim(slot=begun, nonce=nonce)
        entry = self._append(None, build, nonce)
        if entry is None:
            assert after is not None
            return after
        return Claim(slot=entry.claim, nonce=entry.nonce)

    def resume(self, claim: Claim) -> LogState:
        """The state, `claim` being known to hold still. Raises FencedError if it doesn't, or isn't of this log."""
        self.open()
        check_claim(self._state, claim)
        if self.entry(claim.slot).nonce != claim.nonce:
            raise FencedError(
                f"slot {claim.slot} is another process's claim: this is the log of another root"
            )
        return self._state

    def latest(self, claim: Claim) -> CommitRecord | None:
        """What HEAD names now, `claim` being known to hold still; None if it names no commit.

        Raises FencedError, RestoreError if HEAD is nothing because commits were condemned.
        """
        state = self.resume(claim)
        base = resolve_base(state, None, scratch=self._began_anew(state))
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
        """The checkpoint in `folder`, durable before, is committed and HEAD.

        Raises FencedError, StorageError (it is not committed), UnknownOutcomeError (then: `settle` or `void`).
        """

        def build(state: LogState) -> Body:
            return CommitEntry(
                step=step,
                folder=folder,
                size_bytes=size_bytes,
                manifest=manifest,
                parent=state.head,
                legacy=state.legacy,
                metrics=metrics,
            )

        self._append(claim, build)
        return self._state.commits[self._state.tail]

    def mark_restored(self, claim: Claim, commit: int) -> None:
        """The log says that `commit` was read whole, by all ranks."""
        self._append(claim, lambda state: RestoredEntry(commit=state.live_commit(commit).slot))

    def quarantine(self, claim: Claim, commit: int, reason: str) -> CommitRecord | None:
        """`commit` is live no more. Answers what HEAD names now."""
        self._append(
            claim, lambda state: QuarantineEntry(commit=state.live_commit(commit).slot, reason=reason)
        )
        return self._state.latest

    def delete(self, claim: Claim, choose: Callable[[LogState], Sequence[int]]) -> tuple[CommitRecord, ...]:
        """What `choose` picks is live no more, and is answered: its data may go now.

        `choose` is asked again whenever the state has changed; where it picks nothing, nothing is appended.
        """
        chosen: tuple[CommitRecord, ...] = ()

        def build(state: LogState) -> Body | None:
            nonlocal chosen
            chosen = tuple(state.commits[slot] for slot in choose(state))
            return DeleteEntry(commits=tuple(record.slot for record in chosen)) if chosen else None

        self._append(claim, build)
        return chosen

    def void(self, claim: Claim, reason: str, folder: str) -> CommitRecord | None:
        """The save in `folder` is given up and can't become a commit; or, where it has become one, that commit.

        Certain also in a new process, whose predecessor's commit may still be on its way.
        """
        order = Order(
            claim=claim,
            build=lambda state: None if state.commit_in(folder) else VoidEntry(reason=reason, folder=folder),
            unknown=self._pending is not None,
        )
        # Void is put where what had no answer was put: one of them gets the slot.
        self._pending = None
        self._run(order)
        return self._state.commit_in(folder)

    def _began_anew(self, state: LogState) -> bool:
        """HEAD is nothing because the last begin said so, and nothing was committed after it."""
        if state.head is not None or state.legacy is not None or state.claim is None:
            return False
        if state.commits and max(state.commits) > state.claim:
            return False
        body = self.entry(state.claim).body
        return isinstance(body, BeginEntry) and bool(body.scratch)
