"""The log on a store: append, and what may be appended. For one thread at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from stepkeeper.contract import Identity
from stepkeeper.errors import (
    FencedError,
    MissingObjectError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log.entries import (
    Begin,
    Body,
    Commit,
    CommitRecord,
    Delete,
    Entry,
    LegacyBase,
    ManifestRef,
    Owner,
    Quarantine,
    Restored,
    Void,
    new_nonce,
)
from stepkeeper.log.state import Base, LogState, apply, check_owner, entry_for, resolve_base
from stepkeeper.log.tail import find_tail, slot_path
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["Claim", "Log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to append, until a later begin. Survives the process that got it."""

    slot: int
    nonce: str


Build = Callable[[LogState], Body | None]
"""What to append after a state; None: nothing any more. Raises where it is no longer allowed."""


@dataclass(slots=True, kw_only=True)
class _Order:
    """An append under way."""

    claim: Claim | None
    """None: it is a begin."""

    build: Build
    nonce: str | None = None
    """Of its entry, if that is somebody's choice."""

    unknown: bool = False
    """An entry of ours may be in the slot after the tail, or come into it yet."""

    entry: Entry | None = None
    """Put at tail + 1 without an answer: the slot may be empty now and hold it later."""


@final
class Log:
    """Reading needs `open` (or `refresh`) first. Appending needs a claim, from `begin` or `resume`."""

    def __init__(self, store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        self._store = store
        self._patience = patience
        self._state = LogState()
        self._pending: _Order | None = None

    @property
    def state(self) -> LogState:
        """As of the last call."""
        return self._state

    def open(self) -> LogState:
        """The state at the tail: its slot is found by `find_tail`, and then at most 17 entries are read.

        Raises LogGapError, LogFormatError, StorageError.
        """
        self.settle()
        tail = find_tail(self._store, self._patience)
        state = LogState()
        if tail >= 0:
            last = self.entry(tail)
            for slot in range(last.after.index, tail):
                state = apply(state, slot, self.entry(slot))
            state = apply(state, tail, last)
        self._state = state
        return self.refresh()

    def refresh(self) -> LogState:
        """The state with what was appended since; one read if nothing was."""
        self.settle()
        while True:
            try:
                entry = self.entry(self._state.tail + 1)
            except MissingObjectError:
                return self._state
            self._state = apply(self._state, self._state.tail + 1, entry)

    def entry(self, slot: int) -> Entry:
        """What `slot` says. Raises MissingObjectError if nothing is there."""
        return self._patience.retry(lambda: self._read_once(slot))

    def begin(
        self,
        identity: Identity | None = None,
        *,
        base: int | LegacyBase | None = None,
        offer: Callable[[], LegacyBase | None] = lambda: None,
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

        Raises FencedError for an older start of the same job, ForeignRootError for a root of another name that
        `take_over` (True, or that name) doesn't free, RestoreError if `base` isn't live, or if HEAD is nothing
        because commits were condemned. Source: the log.
        """
        owner = _owner_of(identity)

        def build(state: LogState) -> Body | None:
            if after is not None:
                _check_claim(state, after)
                if base is not None and state.stands_on(base):
                    return None
            check_owner(state, owner, take_over)
            anew = base is None and (scratch or self._began_anew(state))
            found = resolve_base(state, base, scratch=anew, offer=offer)
            return _begin(found, owner, host, anew=anew)

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
        _check_claim(self._state, claim)
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
            return Commit(
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

    def restored(self, claim: Claim, commit: int) -> None:
        """The log says that `commit` was read whole, by all ranks."""
        self._append(claim, lambda state: Restored(commit=state.live_commit(commit).slot))

    def quarantine(self, claim: Claim, commit: int, reason: str) -> CommitRecord | None:
        """`commit` is live no more. Answers what HEAD names now."""
        self._append(claim, lambda state: Quarantine(commit=state.live_commit(commit).slot, reason=reason))
        return self._state.latest

    def delete(self, claim: Claim, choose: Callable[[LogState], Sequence[int]]) -> tuple[CommitRecord, ...]:
        """What `choose` picks is live no more, and is answered: its data may go now.

        `choose` is asked again whenever the state has changed; where it picks nothing, nothing is appended.
        """
        chosen: tuple[CommitRecord, ...] = ()

        def build(state: LogState) -> Body | None:
            nonlocal chosen
            chosen = tuple(state.commits[slot] for slot in choose(state))
            return Delete(commits=tuple(record.slot for record in chosen)) if chosen else None

        self._append(claim, build)
        return chosen

    def void(self, claim: Claim, reason: str, folder: str) -> CommitRecord | None:
        """The save in `folder` is given up and can't become a commit; or, where it has become one, that commit.

        Certain also in a new process, whose predecessor's commit may still be on its way.
        """
        order = _Order(
            claim=claim,
            build=lambda state: None if state.commit_in(folder) else Void(reason=reason, folder=folder),
            unknown=self._pending is not None,
        )
        # Void is put where what had no answer was put: one of them gets the slot.
        self._pending = None
        self._run(order)
        return self._state.commit_in(folder)

    def settle(self) -> CommitRecord | None:
        """What had no answer is appended. Answers its commit, if it is one. Raises as the append did."""
        return None if self._pending is None else self._commit_of(self._run(self._pending))

    def _commit_of(self, entry: Entry | None) -> CommitRecord | None:
        return None if entry is None else self._state.commits.get(self._state.tail)

    def _append(self, claim: Claim | None, build: Build, nonce: str | None = None) -> Entry | None:
        """The entry with what `build` answers is at the tail; nothing is appended where it answers None."""
        self.settle()
        return self._run(_Order(claim=claim, build=build, nonce=nonce))

    def _run(self, order: _Order) -> Entry | None:
        while True:
            if order.entry is None:
                if order.claim is not None:
                    _check_claim(self._state, order.claim)
                body = order.build(self._state)
                if body is None:
                    return None
                claim = None if order.claim is None else order.claim.slot
                order.entry = entry_for(self._state, body, claim=claim, nonce=order.nonce or new_nonce())
            winner, mine = self._place(order), order.entry.nonce
            order.entry = None
            self._state = apply(self._state, self._state.tail + 1, winner)
            if winner.nonce == mine:
                return winner

    def _place(self, order: _Order) -> Entry:
        """What the slot after the tail holds, once it holds something: the order's entry, if it was empty."""
        assert order.entry is not None
        slot, data = self._state.tail + 1, order.entry.to_json()
        self._pending = order
        pauses_s = self._patience.pauses_s()
        while True:
            try:
                won = self._store.put_if_absent(slot_path(slot), data)
                winner = order.entry if won else self._read_once(slot)
                order.unknown, self._pending = False, None
                return winner
            except (TransientStorageError, MissingObjectError) as error:
                # Missing: just now it was there. An empty slot resolves nothing: it may be filled yet.
                order.unknown, cause = True, error
            except StorageError as error:
                if not order.unknown:
                    self._pending = None
                    raise
                raise self._unknown_outcome(slot) from error
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise self._unknown_outcome(slot) from cause
            self._patience.sleep(pause_s)

    def _began_anew(self, state: LogState) -> bool:
        """HEAD is nothing because the last begin said so, and nothing was committed after it."""
        if state.head is not None or state.legacy is not None or state.claim is None:
            return False
        if state.commits and max(state.commits) > state.claim:
            return False
        body = self.entry(state.claim).body
        return isinstance(body, Begin) and bool(body.scratch)

    def _unknown_outcome(self, slot: int) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"{self._store.uri}/{slot_path(slot)}: no answer; the entry may be in the log or come into it yet"
        )

    def _read_once(self, slot: int) -> Entry:
        path = slot_path(slot)
        return Entry.from_json(self._store.read(path), f"{self._store.uri}/{path}")


def _begin(base: Base, owner: Owner | None, host: str, *, anew: bool) -> Begin:
    return Begin(
        base=base if isinstance(base, int) else None,
        legacy=base if isinstance(base, LegacyBase) else None,
        scratch=anew or None,
        owner=owner,
        host=host,
    )


def _check_claim(state: LogState, claim: Claim) -> None:
    if state.claim != claim.slot:
        raise FencedError(
            f"claim {claim.slot} is stale: slot {state.claim} has claimed the root"
            + (f" for {state.owner.name} {list(state.owner.ordinal)}" if state.owner else "")
        )


def _owner_of(identity: Identity | None) -> Owner | None:
    if identity is None:
        return None
    return Owner(
        name=f"{identity.namespace}/{identity.job}",
        uid=identity.job_uid,
        jobset_number=identity.jobset_number,
        restart_attempt=identity.restart_attempt,
    )
