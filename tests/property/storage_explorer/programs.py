"""Define what processes do with a root, each by the shipped code, and what they were answered."""

from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from storage_explorer.replay import IMPATIENT, Process, Program

from stepkeeper.checkpoint.orders import SaveOrder, Structure, ValueOrder
from stepkeeper.checkpoint.reading import BlockReader, read_manifests
from stepkeeper.cli.removal import check_removable, commit_to_verify, select_removed
from stepkeeper.cli.root import Root
from stepkeeper.cli.write import _remove_commits
from stepkeeper.companion.messages import (
    ClaimedRoot,
    ClaimRequest,
    CommitRequest,
    OpenRequest,
    QuarantineRequest,
    VerifiedNotice,
    VoidRequest,
)
from stepkeeper.companion.session import Session
from stepkeeper.errors import (
    FencedError,
    PinLostError,
    RefusedError,
    RestoreError,
    TornCheckpointError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log import Claim, CommitRecord, Log, LogState
from stepkeeper.log.claims import is_continued, must_branch
from stepkeeper.policy.keep import Keep, LastN
from stepkeeper.retention.garbage import gc
from stepkeeper.retention.leases import LEASE_ENTRIES
from stepkeeper.retention.pins import Pin, pin_commit, remove_pin, renew_pin
from stepkeeper_testing.background import done
from stepkeeper_testing.checkpoints import write_request
from stepkeeper_testing.pod import pod_identity

T = TypeVar("T")
_ENTRIES = ("v",)
"""The entries of every state that is saved here."""

_BEARABLE = ("FencedError(", "TransientStorageError(", "UnknownOutcomeError(")


def attempt(
    *steps: int,
    last: int = 1,
    restores: bool = True,
    quarantines: bool = False,
    rewinds: bool = False,
    returns: bool = False,
    collects: bool = False,
    forgets: bool = False,
    restored: Collection[str] | None = _ENTRIES,
    start: int | None = None,
) -> Program:
    """A start of the job: claims, restores what HEAD is, saves `steps`; retention keeps `last` commits.

    `start` is its number where an operator counts them: then an older one begins nothing after a later one. Else it
    is one of several that are started by hand, of which the last to begin owns the root.

    With `quarantines` it may find HEAD's bytes bad, with `rewinds` it goes on from the oldest commit, with `returns`
    it goes back to that before each save but the first, with `collects` garbage is collected as soon as it has begun,
    with `forgets` it restores nothing. `restored` are the entries of the state that it restores whole; None if it
    restores a part.
    """
    continues = not forgets and is_continued(restored, _ENTRIES)

    def run(process: Process) -> None:
        session = _session(process, last, start=start)
        try:
            base = _oldest(process) if rewinds else None
            begun = _until_answered(lambda: session.claim_root(ClaimRequest(base=base)))
            process.note("claimed", begun.claim)
            found = begun.base
            if collects:
                _collect(process)
            if found is not None and quarantines and process.choose(2):
                reason = QuarantineRequest(commit=found.slot, reason="a bad block")
                begun = _until_answered(lambda: session.quarantine_commit(reason))
                found = begun.base
            if not continues:
                process.note("forgot", begun.claim.slot)
            if found is not None and restores and continues:
                _restore(process, session, found)
            elif found is not None and not forgets and not continues:
                _read(process, found)
            claim = begun.claim
            for number, step in enumerate(steps):
                if returns and number:
                    claim = _go_back(process, session, claim)
                if not continues:
                    begun = _begin_branch(process, session, begun, step)
                    claim = begun.claim
                _save(process, session, claim, step)
        except FencedError:
            process.note("fenced")
        except RestoreError:
            # All commits were condemned; or the one to go on from was deleted since it was chosen.
            assert quarantines or rewinds or returns or forgets

    return run


def follower(*steps: int, last: int = 1, forgets: bool = False) -> Program:
    """A companion after the one of the first process, under the same claim; it learns what came of the last save.

    With `forgets` its trainer has restored nothing.
    """

    def run(process: Process) -> None:
        notes = process.notes_of_dead(0)
        claims = [note for note in notes if note[0] in ("claimed", "following")]
        if not claims:
            return
        try:
            if claims[-1][0] == "following":
                session = _session(process, last)
                claim = _follow(process, session, claims[-1][1])
            else:
                claim = claims[-1][1]
                session = _session(process, last, claim)
                _until_answered(session.resume_claim)
            saving = next(
                (note for note in reversed(notes) if note[0] in ("saving", "committed", "voided")), None
            )
            if saving is not None and saving[0] == "saving":
                _learn(process, session, saving[1])
            for step in steps:
                if forgets:
                    claim = _begin_branch(process, session, session._describe_claim(), step).claim
                _save(process, session, claim, step)
        except FencedError:
            process.note("fenced")
        except RestoreError:
            # What its predecessor was to go on from was deleted since.
            assert claims[-1][0] == "following"

    return run


def reader(*, holder: str = "a reader", oldest: bool = False, renews: int = 0) -> Program:
    """Holds what HEAD is, or the oldest commit, reads all of it, lets it go.

    It reads as many more times as it `renews` its pin before, however late that is.
    """

    def run(process: Process) -> None:
        log = Log(process, patience=IMPATIENT)

        def latest(state: LogState) -> CommitRecord:
            if state.latest is None:
                raise RestoreError("nothing there")
            return state.live[0] if oldest else state.latest

        try:
            pin, record = _until_answered(
                lambda: pin_commit(log, process, latest, holder=holder, patience=IMPATIENT)
            )
        except RestoreError:
            return
        assert pin is not None
        process.note("held", record.folder, pin.seen)
        _read_held(process, record, pin)
        for _ in range(renews):
            try:
                pin = _until_answered(partial(renew_pin, log, process, pin, patience=IMPATIENT))
            except PinLostError:
                process.note("let-go")
                process.note("lost")
                return
            process.note("held", record.folder, pin.seen)
            process.note("renewed")
            _read_held(process, record, pin)
        process.note("let-go")
        _until_answered(lambda: remove_pin(process, pin, patience=IMPATIENT))

    return run


def _read_held(process: Process, record: CommitRecord, pin: Pin) -> None:
    """Read a commit that is pinned. Only a holder that has been away for too long may find data missing.

    Or there again, for a moment: a late copy of a write arrives after the deletion, between the read and the list.
    """
    try:
        _read(process, record)
    except (TornCheckpointError, TransientStorageError):
        state = _until_answered(Log(process, patience=IMPATIENT).open)
        assert pin.seen is not None
        assert state.tail - pin.seen >= LEASE_ENTRIES
        process.note("away")


def remover(step: int) -> Program:
    """A person removes a commit, by hand, and says again what had no answer."""

    def run(process: Process) -> None:
        try:
            _until_answered(lambda: _remove(process, step))
        except (FencedError, RefusedError, RestoreError):
            # It is the latest, or gone; or others are at work.
            process.note("kept", step)

    return run


def collector() -> Program:
    """Collects garbage without a claim, as a person does by hand."""
    return _collect


def _collect(process: Process) -> None:
    _until_answered(lambda: gc(Log(process, patience=IMPATIENT), process, patience=IMPATIENT))


def _session(process: Process, last: int, claim: Claim | None = None, *, start: int | None = None) -> Session:
    opening = OpenRequest(
        rank=0,
        world_size=1,
        uri=process.uri,
        identity=None if start is None else pod_identity(restart_attempt=start),
        keep=Keep(last=(LastN(last),)),
        claim=claim,
    )
    return Session(opening, lambda directive: None, patience=IMPATIENT)


def _restore(process: Process, session: Session, base: CommitRecord) -> None:
    """Restore as every start does. Data that is gone is condemned, which only a stale start ever has to try."""
    try:
        _read(process, base)
    except TornCheckpointError as torn:
        reason = QuarantineRequest(commit=base.slot, reason=str(torn))
        _until_answered(lambda: session.quarantine_commit(reason))
        raise AssertionError(f"the newest start condemned a commit: {torn}") from torn
    _until_answered(lambda: session.mark_verified(VerifiedNotice(commit=base.slot)))


def _go_back(process: Process, session: Session, claim: Claim) -> Claim:
    """The oldest commit was restored: the next save goes on from there."""
    _until_answered(session.refresh_head)
    oldest = session._log.state.live[0]
    return _follow(process, session, ClaimRequest(base=oldest.slot, after=claim, nonce=process.nonce()))


def _begin_branch(process: Process, session: Session, claimed: ClaimedRoot, step: int) -> ClaimedRoot:
    """Before a save: begin a branch where a trainer does that has restored nothing."""
    if claimed.branching or not must_branch(claimed.base, step):
        return claimed
    _follow(process, session, ClaimRequest(branch=True, after=claimed.claim, nonce=process.nonce()))
    return session._describe_claim()


def _follow(process: Process, session: Session, body: ClaimRequest) -> Claim:
    process.note("following", body)
    begun = _until_answered(lambda: session.claim_root(body))
    assert body.after is not None
    process.note("followed", body.after.slot, begun.claim.slot)
    process.note("claimed", begun.claim)
    return begun.claim


def _remove(process: Process, step: int) -> None:
    log = Log(process, patience=IMPATIENT)
    state = log.open()
    (record,) = select_removed(state, [step], [])
    check_removable(state, [record.slot])
    latest = commit_to_verify(state, [record.slot])
    if latest is not None:
        try:
            # Not by verify_commit, whose threads ask in another order each time.
            _read(process, latest)
        except TornCheckpointError as error:
            raise RefusedError("others have deleted it since") from error
    root = Root(log=log, store=process, patience=IMPATIENT)
    for gone in _remove_commits(root, state.tail, [record.slot])[0]:
        process.note("removed", gone.folder)


def _oldest(process: Process) -> int | None:
    live = _until_answered(Log(process, patience=IMPATIENT).open).live
    return live[0].slot if live else None


def _until_answered(work: Callable[[], T]) -> T:
    while True:
        try:
            return work()
        except (TransientStorageError, UnknownOutcomeError):
            continue


def _save(process: Process, session: Session, claim: Claim, step: int) -> None:
    value = ValueOrder(fqn="v", start=0, length_bytes=4)
    order = SaveOrder(
        rank=0,
        world_size=1,
        step=step,
        claim=claim.slot,
        nonce=process.nonce(),
        structure=Structure(),
        values=(value,),
    )
    process.note("saving", order.folder)
    try:
        session.shares.write_share(write_request(order), process.region)
        committed, after = session.commit_save(
            CommitRequest(folder=order.folder, others=(), duration_millis=1)
        )
    except FencedError:
        process.note("refused", order.folder)
        raise
    except TransientStorageError:
        _until_answered(lambda: session.void_save(VoidRequest(folder=order.folder, reason="no answer")))
        process.note("voided", order.folder)
        return
    assert committed.record.folder == order.folder
    process.note("committed", order.folder, committed.record.slot)
    done(after)
    complaint = session._upkeep.complaint
    assert complaint is None or complaint.partition(": ")[2].startswith(_BEARABLE), complaint


def _learn(process: Process, session: Session, folder: str) -> None:
    """Learn for good what became of a dead process's save."""
    _until_answered(lambda: session.void_save(VoidRequest(folder=folder, reason="its companion was lost")))
    record = session._log.state.commit_in(folder)
    if record is None:
        process.note("voided", folder)
    else:
        process.note("committed", folder, record.slot)


def _read(process: Process, record: CommitRecord) -> None:
    """All of the commit, verified as any reader does. Raises TornCheckpointError."""
    manifests = read_manifests(process, record, patience=IMPATIENT)
    objects = BlockReader(process, manifests, patience=IMPATIENT)
    for each in manifests[0].objects:
        objects.read_verified(each.path, 0, each.size_bytes)
