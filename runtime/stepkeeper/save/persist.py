"""One save of one rank once its snapshot is on its way to the host: place, write, vote, commit."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from stepkeeper.checkpoint import SaveOrder
from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Commit, Committed, Kind, Staged, Upload, Void, Write, Written
from stepkeeper.companion.plan_cache import Common, Told, name_of, plan_of
from stepkeeper.companion.supervisor import Companion, Origin
from stepkeeper.contract.wire import decode, encode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.error_codec import decode_error, encode_error
from stepkeeper.errors import CompanionLostError, DevicesFullError, FencedError, SaveError, StepkeeperError
from stepkeeper.log.entries import new_nonce
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.snapshot import Region, Snapshot

__all__ = ["SaveJob", "SaveState", "persist"]

_log: Final = logger(__name__)
_SAVE_TIMEOUT_S: Final = 3600.0


class SaveState(StrEnum):
    TRANSFERRING = "Transferring"
    WRITING = "Writing"
    COMMITTING = "Committing"
    COMMITTED = "Committed"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    name: str
    """What the ranks call it among themselves."""

    step: int
    origin: Origin | None
    """What the state was restored from, if it was: a begin that this save may have to write goes on from there."""

    snapshot: Snapshot
    region: Region
    transferred: Future[None]
    """All of the snapshot is in the region; or why it isn't."""

    moved: Callable[[SaveState], None]
    duration_millis: Callable[[], int]
    release: Callable[[], None] = lambda: None
    """Told when the region is needed no more, if that is before the save has ended."""

    is_last: bool = False
    """No other save comes after it: it goes to the root at once, and nobody needs the region again."""

    wrote: Callable[[int], None] = lambda _size_bytes: None
    """Told how many bytes this rank made durable."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    """What the training says of the step, as numbers in text."""


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
        process = companion.process()
        written = _write(job, process, place, rank_group, staged=companion.has_tier and not job.is_last)
        job.wrote(written.size_bytes)
        job.moved(SaveState.COMMITTING)
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
            claim = companion.begin(origin=job.origin).claim
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


def _write(
    job: SaveJob, process: CompanionProcess, place: _Place, rank_group: RankGroup, *, staged: bool
) -> Written:
    job.moved(SaveState.WRITING)
    order = SaveOrder(
        rank=rank_group.rank,
        world_size=rank_group.world_size,
        step=job.step,
        claim=place.claim,
        nonce=place.nonce,
        tensors=(),
        values=job.snapshot.values,
    )
    if staged and _stage(job, process, order):
        job.release()
        upload = encode(Upload(folder=order.folder))
        return decode(Written, process.ask(Kind.UPLOAD, upload, timeout_s=_SAVE_TIMEOUT_S))
    return decode(Written, _ask_to_write(Kind.WRITE, job, process, order))


def _ask_to_write(kind: Kind, job: SaveJob, process: CompanionProcess, order: SaveOrder) -> dict[str, Any]:
    """The answer. What the process knows from the save before isn't told again."""
    snapshot = job.snapshot
    common = Common(tensors=snapshot.tensors, aliases=snapshot.aliases, key_paths=snapshot.key_paths)
    plan, told = None, process.told
    if told is None or told.common != common:
        plan = plan_of(common)
        told = Told(common=common, name=name_of(plan))
    body = encode(Write(order=order, plan=told.name, told=plan))
    # Until there is an answer it may hold either.
    process.told = None
    answer = process.ask(kind, body, [job.region.fd], timeout_s=_SAVE_TIMEOUT_S)
    process.told = told
    return answer


def _stage(job: SaveJob, process: CompanionProcess, order: SaveOrder) -> bool:
    """True if all is on the local disk, which is as good as nowhere, but that the region is free."""
    staged = decode(Staged, _ask_to_write(Kind.STAGE, job, process, order))
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
            _void(process, Void(folder=place.folder(job.step), reason=str(error)))
        return {"error": encode_error(error)}
    written = [decode(Written, vote["written"]) for vote in votes]
    body = Commit(
        folder=place.folder(job.step),
        others=tuple(each.manifest for each in written[1:]),
        duration_millis=job.duration_millis(),
        metrics=dict(job.metrics) or None,
    )
    return {"committed": process.ask(Kind.COMMIT, encode(body), timeout_s=_SAVE_TIMEOUT_S)}


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


def _void(process: CompanionProcess, void: Void) -> None:
    """The log says that nothing will come of the folder, if it can be told; nothing names it otherwise."""
    try:
        process.ask(Kind.VOID, encode(void), timeout_s=_SAVE_TIMEOUT_S)
    except FencedError:
        raise
    except StepkeeperError as error:
        _log.warning("%s could not be declared void: %s", void.folder, error)
