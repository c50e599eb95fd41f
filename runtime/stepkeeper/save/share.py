"""Let the companion write one rank's share of a save, for as long as it makes progress."""

from typing import Any, Final

from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Kind, Staged, UploadRequest, WriteRequest, Written
from stepkeeper.contract.wire import decode, encode
from stepkeeper.loggers import logger
from stepkeeper.save.job import Place, SaveJob
from stepkeeper.save.report import SaveState
from stepkeeper.storage.moved import create_counter, read_counter
from stepkeeper.time_limits import TimeLimits

__all__ = ["write_share"]

_log: Final = logger(__name__)


class _ShareProgress:
    """Follow how many bytes of a share the companion has moved, for one save."""

    def __init__(self, job: SaveJob, limits: TimeLimits) -> None:
        self.counter: Final = create_counter()
        self.limit_s: Final = limits.share_silence_s(job.region.size_bytes)
        self._note_moved: Final = job.note_moved
        self._moved_bytes = 0

    def has_moved(self) -> bool:
        """Return True if bytes were moved since the last call, and note them."""
        before, self._moved_bytes = self._moved_bytes, read_counter(self.counter.fd)
        if self._moved_bytes == before:
            return False
        self._note_moved(self._moved_bytes - before)
        return True


def write_share(
    job: SaveJob, process: CompanionProcess, limits: TimeLimits, place: Place, *, staged: bool
) -> Written:
    """Let the companion write this rank's share durably, however long that takes while it makes progress.

    Raises CompanionLostError if it makes none, or is gone, StepkeeperError if the share can't be written.
    """
    job.in_flight.set_state(SaveState.WRITING)
    progress = _ShareProgress(job, limits)
    try:
        if staged and _stage_share(job, process, place, progress):
            # The companion uploads from the local disk now.
            job.release_region()
            upload = encode(UploadRequest(folder=place.folder(job.step)))
            answer = process.send_request(
                Kind.UPLOAD,
                upload,
                [progress.counter.fd],
                timeout_s=progress.limit_s,
                makes_progress=progress.has_moved,
            )
        else:
            answer = _request_write(Kind.WRITE, job, process, place, progress)
        return decode(Written, answer)
    finally:
        progress.counter.close()


def _request_write(
    kind: Kind, job: SaveJob, process: CompanionProcess, place: Place, progress: _ShareProgress
) -> dict[str, Any]:
    """Send a write request. A structure that the process has from the previous save isn't sent again."""
    structure = job.snapshot.plan.structure
    request = WriteRequest(
        step=job.step,
        claim=place.claim,
        nonce=place.nonce,
        values=job.snapshot.values,
        structure_key=structure.key,
        structure=None if process.structure_key == structure.key else structure.text,
    )
    # Without an answer it is unknown which structure the process has.
    process.structure_key = None
    answer = process.send_request(
        kind,
        encode(request),
        [job.region.fd, progress.counter.fd],
        timeout_s=progress.limit_s,
        makes_progress=progress.has_moved,
    )
    process.structure_key = structure.key
    return answer


def _stage_share(job: SaveJob, process: CompanionProcess, place: Place, progress: _ShareProgress) -> bool:
    """Write this rank's share to the local disk, not durably. Return whether the region is free now."""
    staged = decode(Staged, _request_write(Kind.STAGE, job, process, place, progress))
    if staged.why_not is not None:
        _log.warning(
            "step %d is written to the root without the local tier, and so are later steps until this is fixed: %s",
            job.step,
            staged.why_not,
            extra={"step": job.step},
        )
    return staged.held
