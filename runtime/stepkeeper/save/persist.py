"""Persist one save of one rank: agree on a folder, write, vote, and commit."""

from collections.abc import Mapping
from typing import Any, Final

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import (
    CommitRequest,
    Committed,
    Kind,
    VoidRequest,
    Written,
)
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import (
    UNANSWERED,
    CompanionLostError,
    DevicesFullError,
    FencedError,
    PeerLostError,
    SaveError,
    StepkeeperError,
    StorageAwayError,
    decode_error,
    encode_error,
)
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.job import Place, SaveJob
from stepkeeper.save.report import SaveState
from stepkeeper.save.share import write_share
from stepkeeper.save.snapshot.transfer import await_transfer
from stepkeeper.time_limits import CLAIM_S, ENTRY_S

__all__ = ["persist_save"]

_log: Final = logger(__name__)
_LATE_VOID_S: Final = 10.0
"""Seconds for voiding a save after the loss of a rank: this process is about to end."""


def persist_save(job: SaveJob, companion: Companion, rank_group: RankGroup) -> Committed:
    """Turn the snapshot into a commit in the log. All ranks call this.

    A rank that fails reports it in its vote, so that no other rank waits for it in vain. One failure voids
    the save. A rank that is stopped can't vote: the others miss its heartbeats.

    Raises RanksDifferError if the ranks' states differ, CopiesDifferError if their copies of a tensor do, and
    StepkeeperError: the save is no commit and never will be.
    """
    snapshot = job.snapshot
    with rank_group.heartbeat() as report_moved:
        job = job.noting_moved(report_moved)
        transfer_s = rank_group.limits.transfer_s(snapshot.transfer_bytes)
        transfer_error = await_transfer(job.transfer, snapshot, transfer_s, job.note_moved)
        check_same_state(
            job.name,
            job.step,
            snapshot.digest,
            rank_group,
            copies=snapshot.copy_digests,
            transfer_bytes=snapshot.transfer_bytes,
        )
        return _write_and_commit(job, transfer_error, companion, rank_group)


def _write_and_commit(
    job: SaveJob, transfer_error: Exception | None, companion: Companion, rank_group: RankGroup
) -> Committed:
    """Write this rank's share if its snapshot arrived, vote, and let rank 0 commit. Raises as `persist_save`."""
    limits = rank_group.limits
    failure: Exception | None = None
    process: CompanionProcess | None = None
    place: Place | None = None
    try:
        # Before anything that can fail here: the other ranks wait until rank 0 has answered with a place or an error.
        place = _agree_on_place(job, companion, rank_group)
        if transfer_error is not None:
            raise transfer_error
        process = companion.ensure_process()
        written = write_share(job, process, limits, place, staged=companion.has_tier and not job.is_last)
        job.in_flight.mark_share_durable(written.size_bytes)
        job.in_flight.set_state(SaveState.COMMITTING)
        vote = {"written": encode(written)}
    except Exception as error:  # raised below, after the other ranks have received it
        failure = error
        vote = {"error": encode_error(error)}
    votes_s = limits.vote_s(job.region.size_bytes)
    try:
        votes = rank_group.gather(f"{job.name}/vote", vote, votes_s)
    except PeerLostError as error:
        # A new companion process would start too late.
        can_void = rank_group.rank == 0 and process is not None and not process.lost
        if can_void and place is not None:
            void = VoidRequest(folder=place.folder(job.step), reason=f"not all ranks have voted: {error}")
            _void_folder(companion, process, void, error, _LATE_VOID_S)
        raise
    outcome: dict[str, Any] | None = None
    if rank_group.rank == 0:
        try:
            outcome = _commit_or_void(job, companion, process, place, votes)
        except Exception as error:  # raised below, after the other ranks have received it
            failure = failure or error
            outcome = {"error": encode_error(error)}
    # Rank 0 waits for the votes, then commits. If that fails, it voids the save, if need be by another companion.
    outcome = rank_group.broadcast(f"{job.name}/outcome", outcome, votes_s + 3 * ENTRY_S)
    if "error" in outcome:
        raise _choose_error(failure, decode_error(outcome["error"]))
    committed = decode(Committed, outcome["committed"])
    if process is not None and rank_group.rank == 0:
        job.in_flight.upkeep = process.upkeep_of(committed.record.slot)
    return committed


def _choose_error(own: Exception | None, shared: Exception) -> Exception:
    """Choose the error that this rank raises: its own, the most specific one, except in two cases.

    - The next save recovers from it: all ranks must forgive a failure, or none.
    - Another claim owns the root: its collection may have caused the failure, and all ranks exit as fenced.
    """
    if isinstance(own, FencedError):
        return own
    if own is None or isinstance(shared, FencedError) or _next_save_recovers(own):
        shared.__cause__ = own
        return shared
    return own


def _agree_on_place(job: SaveJob, companion: Companion, rank_group: RankGroup) -> Place:
    """Agree on the save's folder, under the claim of rank 0. Rank 0 claims the root now if it hasn't yet."""
    place: dict[str, Any] | None = None
    failure: Exception | None = None
    if rank_group.rank == 0:
        try:
            claim = companion.claim_root(
                origin=job.origin, unrestored_step=None if job.is_continued else job.step
            ).claim
            place = {"claim": claim.slot, "nonce": new_nonce()}
        except Exception as error:  # raised below, after the other ranks have received it
            failure = error
            place = {"error": encode_error(error)}
    place = rank_group.broadcast(f"{job.name}/place", place, rank_group.limits.apart_s + CLAIM_S)
    if failure is not None:
        raise failure
    if "error" in place:
        raise decode_error(place["error"])
    return Place(claim=int(place["claim"]), nonce=str(place["nonce"]))


def _commit_or_void(
    job: SaveJob,
    companion: Companion,
    process: CompanionProcess | None,
    place: Place | None,
    votes: list[dict[str, Any]],
) -> dict[str, Any]:
    """Commit the save on rank 0 if all ranks voted for it, else void it.

    Only `process`, which has written rank 0's share, can commit it. Raises FencedError if another claim owns
    the root, whatever else has failed, or StepkeeperError once the save is void.
    """
    folder = None if place is None else place.folder(job.step)
    refusals = {rank: decode_error(vote["error"]) for rank, vote in enumerate(votes) if "error" in vote}
    if refusals or process is None or folder is None:
        error = _join_refusals(job.step, refusals)
        if folder is not None:
            _void_folder(companion, process, VoidRequest(folder=folder, reason=str(error)), error)
        return {"error": encode_error(error)}
    try:
        return {"committed": _request_commit(job, process, folder, votes)}
    except StepkeeperError as error:
        if not isinstance(error, FencedError):
            _void_folder(companion, process, VoidRequest(folder=folder, reason=str(error)), error)
        raise


def _request_commit(
    job: SaveJob, process: CompanionProcess, folder: str, votes: list[dict[str, Any]]
) -> dict[str, Any]:
    written = [decode(Written, vote["written"]) for vote in votes]
    body = CommitRequest(
        folder=folder,
        others=tuple(each.manifest for each in written[1:]),
        duration_millis=job.in_flight.duration_millis(),
        metrics=dict(job.metrics) or None,
    )
    return process.send_request(Kind.COMMIT, encode(body), timeout_s=ENTRY_S)


def _join_refusals(step: int, refusals: Mapping[int, Exception]) -> StepkeeperError:
    """Join the ranks' refusals into one error, whose class decides on all ranks how the job continues."""
    reasons = "; ".join(f"rank {rank}: {error}" for rank, error in refusals.items())
    text = f"the save of step {step} was given up: {reasons}"
    if any(isinstance(error, FencedError) for error in refusals.values()):  # then all exit as fenced
        return FencedError(text)
    if all(_next_save_recovers(error) for error in refusals.values()):
        full = any(isinstance(error, DevicesFullError) for error in refusals.values())
        return DevicesFullError(text) if full else CompanionLostError(text)
    # A start after the store has answered again may succeed.
    if all(_next_save_recovers(error) or isinstance(error, UNANSWERED) for error in refusals.values()):
        return StorageAwayError(text)
    return SaveError(text)


def _next_save_recovers(error: Exception) -> bool:
    return isinstance(error, StepkeeperError) and error.next_save_recovers


def _void_folder(
    companion: Companion,
    process: CompanionProcess | None,
    void: VoidRequest,
    error: Exception,
    timeout_s: float = ENTRY_S,
) -> None:
    """Record in the log that the folder is void. If that fails, nothing in the log names the folder.

    A lost companion process is replaced for that, unless the next save replaces it anyway. Raises FencedError
    if another claim owns the root: `error` may only be what that claim has caused.
    """
    usable = None if process is None or process.lost else process
    if usable is None and _next_save_recovers(error):
        return
    try:
        usable = usable or companion.ensure_process()
        usable.send_request(Kind.VOID, encode(void), timeout_s=timeout_s)
    except FencedError as fence:
        raise fence from error
    except StepkeeperError as refusal:
        _log.warning("%s could not be declared void: %s", void.folder, refusal)
