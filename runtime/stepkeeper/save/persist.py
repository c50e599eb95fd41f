"""One save of one rank once its snapshot is on its way to the host: place, write, vote, commit."""

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

__all__ = ["SaveJob", "persist"]

_log: Final = logger(__name__)
_SAVE_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save from its snapshot on: the state itself isn't needed any more."""

    name: str
    """What the ranks call it among themselves."""

    in_flight: InFlight
    """Told how far it has come."""

    origin: Origin | None
    """What the state was restored from, if it was: a claim that this save may have to make goes on from there."""

    snapshot: Snapshot
    region: Region
    transferred: Future[None]
    """All of the snapshot is in the region; or why it isn't."""

    release: Callable[[], None] = lambda: None
    """Told when the region is needed no more, if that is before the save has ended."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    """What the training says of the step, as numbers in text."""

    is_last: bool = False
    """As `SaveRequest` has it."""

    @property
    def step(self) -> int:
        return self.in_flight.step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    claim: int
    nonce: str

    def folder(self, step: int) -> str:
        return checkpoint_folder(step, self.claim, self.nonce)


def persist(job: SaveJob, companion: Companion, rank_group: RankGroup) -> Committed:
    """The snapshot is a commit in the log.

    A rank that fails says so in its vote, so that no other waits for it in vain; one failure voids the save.

    Ranks: all.

    Raises:
        RanksDifferError: the ranks' states differ. Nothing was written.
        StepkeeperError: it is no commit and never will be.

    """
    lost: Exception | None = None
    try:
        job.transferred.result()
    except Exception as error:  # raised below, once the others can be told
        lost = error
    check_same_state(job.name, job.step, job.snapshot.summary, rank_group)
    failure: Exception | None = None
    process: CompanionProcess | None = None
    place: _Place | None = None
    try:
        # First: until rank 0 has said where, or that it can't, the others wait, also for one whose companion is lost.
        place = _place(job, companion, rank_group)
        if lost is not None:
            raise lost
        process = companion.ensure_process()
        written = _write(job, process, place, staged=companion.has_tier and not job.is_last)
        job.in_flight.note_written(written.size_bytes)
        job.in_flight.reach(SaveState.COMMITTING)
        vote = {"written": encode(written)}
    except Exception as error:  # raised below, once the others have been told
        failure = error
        vote = {"error": encode_error(error)}
    votes = rank_group.gather(f"{job.name}/vote", vote, _SAVE_TIMEOUT_S)
    outcome: dict[str, Any] | None = None
    if rank_group.rank == 0:
        try:
            outcome = _decide(job, process, place, votes)
        except Exception as error:  # raised below, once the others have been told
            failure = failure or error
            outcome = {"error": encode_error(error)}
    outcome = rank_group.broadcast(f"{job.name}/outcome", outcome, _SAVE_TIMEOUT_S)
    if "error" in outcome:
        raise _own_or_shared(failure, decode_error(outcome["error"]))
    return decode(Committed, outcome["committed"])


def _own_or_shared(own: Exception | None, shared: Exception) -> Exception:
    """What this rank raises: its own failure says most, but what the next save mends all ranks forgive or none."""
    if own is None or _next_save_mends(own):
        shared.__cause__ = own
        return shared
    return own


def _place(job: SaveJob, companion: Companion, rank_group: RankGroup) -> _Place:
    """Where this save goes: under the claim of rank 0, which is made now if there is none."""
    place: dict[str, Any] | None = None
    failure: Exception | None = None
    if rank_group.rank == 0:
        try:
            claim = companion.claim_root(origin=job.origin).claim
            place = {"claim": claim.slot, "nonce": new_nonce()}
        except Exception as error:  # raised below, once the others have been told
            failure = error
            place = {"error": encode_error(error)}
    place = rank_group.broadcast(f"{job.name}/place", place, _SAVE_TIMEOUT_S)
    if failure is not None:
        raise failure
    if "error" in place:
        raise decode_error(place["error"])
    return _Place(claim=int(place["claim"]), nonce=str(place["nonce"]))


def _write(job: SaveJob, process: CompanionProcess, place: _Place, *, staged: bool) -> Written:
    job.in_flight.reach(SaveState.WRITING)
    if staged and _stage(job, process, place):
        job.release()
        upload = encode(UploadRequest(folder=place.folder(job.step)))
        return decode(Written, process.send_request(Kind.UPLOAD, upload, timeout_s=_SAVE_TIMEOUT_S))
    return decode(Written, _ask_to_write(Kind.WRITE, job, process, place))


def _ask_to_write(kind: Kind, job: SaveJob, process: CompanionProcess, place: _Place) -> dict[str, Any]:
    """Have the process write this rank's share. A structure that it holds from the save before isn't told again."""
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


def _stage(job: SaveJob, process: CompanionProcess, place: _Place) -> bool:
    """True if all is on the local disk, which is as good as nowhere, but that the region is free."""
    staged = decode(Staged, _ask_to_write(Kind.STAGE, job, process, place))
    if staged.why_not is not None:
        _log.warning(
            "step %d, and those after it until this is mended, goes to the root without the local tier: %s",
            job.step,
            staged.why_not,
            extra={"step": job.step},
        )
    return staged.held


def _decide(
    job: SaveJob, process: CompanionProcess | None, place: _Place | None, votes: list[dict[str, Any]]
) -> dict[str, Any]:
    """Rank 0's part: the commit if all voted for it, else its void."""
    refusals = {rank: decode_error(vote["error"]) for rank, vote in enumerate(votes) if "error" in vote}
    if refusals or process is None or place is None:
        error = _given_up(job.step, refusals)
        if process is not None and place is not None and not process.lost:
            _void(process, VoidRequest(folder=place.folder(job.step), reason=str(error)))
        return {"error": encode_error(error)}
    written = [decode(Written, vote["written"]) for vote in votes]
    body = CommitRequest(
        folder=place.folder(job.step),
        others=tuple(each.manifest for each in written[1:]),
        duration_millis=job.in_flight.duration_millis(),
        metrics=dict(job.metrics) or None,
    )
    return {"committed": process.send_request(Kind.COMMIT, encode(body), timeout_s=_SAVE_TIMEOUT_S)}


def _given_up(step: int, refusals: Mapping[int, Exception]) -> StepkeeperError:
    """The one error that all ranks raise: of a kind of its own where that decides how the job goes on."""
    said = "; ".join(f"rank {rank}: {error}" for rank, error in refusals.items())
    text = f"the save of step {step} was given up: {said}"
    if any(isinstance(error, FencedError) for error in refusals.values()):
        return FencedError(text)
    if all(_next_save_mends(error) for error in refusals.values()):
        full = any(isinstance(error, DevicesFullError) for error in refusals.values())
        return DevicesFullError(text) if full else CompanionLostError(text)
    return SaveError(text)


def _next_save_mends(error: Exception) -> bool:
    return isinstance(error, StepkeeperError) and error.next_save_mends


def _void(process: CompanionProcess, void: VoidRequest) -> None:
    """The log says that nothing will come of the folder, if it can be told; nothing names it otherwise."""
    try:
        process.send_request(Kind.VOID, encode(void), timeout_s=_SAVE_TIMEOUT_S)
    except FencedError:
        raise
    except StepkeeperError as error:
        _log.warning("%s could not be declared void: %s", void.folder, error)
