"""Persist one save of one rank: agree on a folder, write, vote, and commit."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import (
    CommitRequest,
    Committed,
    Kind,
    Staged,
    UploadRequest,
    VoidRequest,
    WriteRequest,
    Written,
)
from stepkeeper.companion.supervisor import Companion, Origin
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.error_codec import decode_error, encode_error
from stepkeeper.errors import CompanionLostError, DevicesFullError, FencedError, SaveError, StepkeeperError
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.report import SaveState
from stepkeeper.save.snapshot import Region, Snapshot

__all__ = ["SaveJob", "persist_save"]

_log: Final = logger(__name__)
_SAVE_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save from its snapshot on. It doesn't refer to the state any more."""

    name: str
    """The ranks' name for this save."""

    in_flight: InFlight
    """Updated as the save proceeds."""

    origin: Origin | None
    """The commit that the state was restored from, if it was. If this save claims the root, the claim goes on from
    there.
    """

    snapshot: Snapshot
    region: Region
    transfer: Future[None]
    """Resolved when the whole snapshot is in the region, or with the error of its transfer."""

    release_region: Callable[[], None] = lambda: None
    """Called when the region isn't needed any more, if that is before the end of the save."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    """The training's metrics of the step, as numbers in text."""

    is_last: bool = False
    """True if no save comes after this one: see `SaveRequest`."""

    @property
    def step(self) -> int:
        return self.in_flight.step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    claim: int
    nonce: str

    def folder(self, step: int) -> str:
        return checkpoint_folder(step, self.claim, self.nonce)


def persist_save(job: SaveJob, companion: Companion, rank_group: RankGroup) -> Committed:
    """Turn the snapshot into a commit in the log.

    A rank that fails says so in its vote, so that no other rank waits for it in vain. One failure voids the save.

    Ranks: all ranks call this.

    Raises:
        RanksDifferError: The ranks' states differ. Nothing was written.
        StepkeeperError: The save is no commit and never will be.

    """
    lost: Exception | None = None
    try:
        job.transfer.result()
    except Exception as error:  # raised below, after the ranks have compared their states
        lost = error
    check_same_state(job.name, job.step, job.snapshot.summary, rank_group)
    failure: Exception | None = None
    process: CompanionProcess | None = None
    place: _Place | None = None
    try:
        # Before anything that can fail here: the other ranks wait until rank 0 has answered with a place or an error.
        place = _agree_on_place(job, companion, rank_group)
        if lost is not None:
            raise lost
        process = companion.ensure_process()
        written = _write_share(job, process, place, staged=companion.has_tier and not job.is_last)
        job.in_flight.mark_share_durable(written.size_bytes)
        job.in_flight.set_state(SaveState.COMMITTING)
        vote = {"written": encode(written)}
    except Exception as error:  # raised below, after the other ranks have received it
        failure = error
        vote = {"error": encode_error(error)}
    votes = rank_group.gather(f"{job.name}/vote", vote, _SAVE_TIMEOUT_S)
    outcome: dict[str, Any] | None = None
    if rank_group.rank == 0:
        try:
            outcome = _commit_or_void(job, process, place, votes)
        except Exception as error:  # raised below, after the other ranks have received it
            failure = failure or error
            outcome = {"error": encode_error(error)}
    outcome = rank_group.broadcast(f"{job.name}/outcome", outcome, _SAVE_TIMEOUT_S)
    if "error" in outcome:
        raise _choose_error(failure, decode_error(outcome["error"]))
    return decode(Committed, outcome["committed"])


def _choose_error(own: Exception | None, shared: Exception) -> Exception:
    """Choose the error that this rank raises.

    Its own failure says most. But all ranks must forgive a failure or none, so one that the next save mends gives
    way to the shared error.
    """
    if own is None or _is_mended_by_next_save(own):
        shared.__cause__ = own
        return shared
    return own


def _agree_on_place(job: SaveJob, companion: Companion, rank_group: RankGroup) -> _Place:
    """Agree on the save's folder, under the claim of rank 0. Rank 0 claims the root now if it hasn't yet."""
    place: dict[str, Any] | None = None
    failure: Exception | None = None
    if rank_group.rank == 0:
        try:
            claim = companion.claim_root(origin=job.origin).claim
            place = {"claim": claim.slot, "nonce": new_nonce()}
        except Exception as error:  # raised below, after the other ranks have received it
            failure = error
            place = {"error": encode_error(error)}
    place = rank_group.broadcast(f"{job.name}/place", place, _SAVE_TIMEOUT_S)
    if failure is not None:
        raise failure
    if "error" in place:
        raise decode_error(place["error"])
    return _Place(claim=int(place["claim"]), nonce=str(place["nonce"]))


def _write_share(job: SaveJob, process: CompanionProcess, place: _Place, *, staged: bool) -> Written:
    job.in_flight.set_state(SaveState.WRITING)
    if staged and _stage_share(job, process, place):
        job.release_region()
        upload = encode(UploadRequest(folder=place.folder(job.step)))
        return decode(Written, process.send_request(Kind.UPLOAD, upload, timeout_s=_SAVE_TIMEOUT_S))
    return decode(Written, _request_write(Kind.WRITE, job, process, place))


def _request_write(kind: Kind, job: SaveJob, process: CompanionProcess, place: _Place) -> dict[str, Any]:
    """Send a write request. A structure that the process holds from the save before isn't sent again."""
    structure = job.snapshot.plan.structure
    request = WriteRequest(
        step=job.step,
        claim=place.claim,
        nonce=place.nonce,
        values=job.snapshot.values,
        structure_key=structure.key,
        structure=None if process.structure_key == structure.key else structure.text,
    )
    # Until there is an answer it may hold either.
    process.structure_key = None
    answer = process.send_request(kind, encode(request), [job.region.fd], timeout_s=_SAVE_TIMEOUT_S)
    process.structure_key = structure.key
    return answer


def _stage_share(job: SaveJob, process: CompanionProcess, place: _Place) -> bool:
    """Write this rank's share to the local disk, which frees the region but makes nothing durable.

    Returns:
        True if the region isn't needed any more.

    """
    staged = decode(Staged, _request_write(Kind.STAGE, job, process, place))
    if staged.why_not is not None:
        _log.warning(
            "step %d, and those after it until this is mended, goes to the root without the local tier: %s",
            job.step,
            staged.why_not,
            extra={"step": job.step},
        )
    return staged.held


def _commit_or_void(
    job: SaveJob, process: CompanionProcess | None, place: _Place | None, votes: list[dict[str, Any]]
) -> dict[str, Any]:
    """Commit the save on rank 0 if all ranks voted for it, else void it."""
    refusals = {rank: decode_error(vote["error"]) for rank, vote in enumerate(votes) if "error" in vote}
    if refusals or process is None or place is None:
        error = _join_refusals(job.step, refusals)
        if process is not None and place is not None and not process.lost:
            _void_folder(process, VoidRequest(folder=place.folder(job.step), reason=str(error)))
        return {"error": encode_error(error)}
    written = [decode(Written, vote["written"]) for vote in votes]
    body = CommitRequest(
        folder=place.folder(job.step),
        others=tuple(each.manifest for each in written[1:]),
        duration_millis=job.in_flight.duration_millis(),
        metrics=dict(job.metrics) or None,
    )
    return {"committed": process.send_request(Kind.COMMIT, encode(body), timeout_s=_SAVE_TIMEOUT_S)}


def _join_refusals(step: int, refusals: Mapping[int, Exception]) -> StepkeeperError:
    """Join the ranks' refusals into the one error that all ranks raise.

    The error's class decides how the job goes on: a lost claim and failures that the next save mends have their
    own.
    """
    reasons = "; ".join(f"rank {rank}: {error}" for rank, error in refusals.items())
    text = f"the save of step {step} was given up: {reasons}"
    if any(isinstance(error, FencedError) for error in refusals.values()):
        return FencedError(text)
    if all(_is_mended_by_next_save(error) for error in refusals.values()):
        full = any(isinstance(error, DevicesFullError) for error in refusals.values())
        return DevicesFullError(text) if full else CompanionLostError(text)
    return SaveError(text)


def _is_mended_by_next_save(error: Exception) -> bool:
    return isinstance(error, StepkeeperError) and error.next_save_mends


def _void_folder(process: CompanionProcess, void: VoidRequest) -> None:
    """Note in the log that the folder is void. If that fails, nothing in the log names the folder."""
    try:
        process.send_request(Kind.VOID, encode(void), timeout_s=_SAVE_TIMEOUT_S)
    except FencedError:
        raise
    except StepkeeperError as error:
        _log.warning("%s could not be declared void: %s", void.folder, error)
