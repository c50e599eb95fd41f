"""Define every error that stepkeeper raises by design, and carry errors from one process to another.

All of them derive from StepkeeperError, and each also from the builtin exception that it is a case of. The classes that
a training may want to catch are names of `stepkeeper` itself.
"""

import traceback
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "UNANSWERED",
    "BadBytes",
    "BadItem",
    "BadNodeError",
    "BadUriError",
    "ClosedError",
    "CompanionError",
    "CompanionLostError",
    "ContradictedEntryError",
    "DamagedEntryError",
    "DevicesFullError",
    "FencedError",
    "ForeignStepsError",
    "LogFormatError",
    "LogGapError",
    "ManifestError",
    "MissingObjectError",
    "NoAccessError",
    "NotExclusiveError",
    "NotInPodError",
    "NoticeDeadlineError",
    "ObjectExistsError",
    "OtherJobsRootError",
    "PartlyRestoredError",
    "PeerLostError",
    "PinFormatError",
    "PinLostError",
    "ProcessGroupError",
    "RefusedError",
    "RestoreError",
    "SaveError",
    "StepkeeperError",
    "StorageAwayError",
    "StorageError",
    "TornCheckpointError",
    "TransientStorageError",
    "UnknownOutcomeError",
    "UnsharedRootError",
    "VerifyError",
    "decode_error",
    "encode_error",
    "text_with_notes",
]


class StepkeeperError(Exception):
    """The base class of all errors that stepkeeper raises by design."""

    next_save_mends: ClassVar[bool] = False
    """True if the next save is expected to succeed after one failed with this error: training needn't end for it."""


class BadUriError(StepkeeperError, ValueError):
    """Raised when a checkpoint URI or path names no store. The message says what to write instead."""


class StorageError(StepkeeperError, OSError):
    """Raised when a store refuses for good: no permission, no space, no such bucket.

    Trying again changes nothing: mend what the message names.
    """


class TransientStorageError(StorageError):
    """Raised when a store gave no answer, or asked to try later. Operations that retry raise it when their patience
    ends.

    After a put the outcome is unknown. This error never means bad bytes. Try again later.
    """


class NoAccessError(StorageError, PermissionError):
    """Raised when a bucket can't be used as things are: no credentials, no permission, or no bucket of that name.

    It is raised at once, since waiting changes nothing. The message names the bucket, and says what to do.
    """


class MissingObjectError(StorageError, FileNotFoundError):
    """Raised when a store says that an object isn't there."""


class ObjectExistsError(StorageError, FileExistsError):
    """Raised when a write meets other bytes under its name. Nothing was overwritten; use another folder."""


class NotExclusiveError(StorageError):
    """Raised when a store may tell two writers of one name that both created it.

    No log can live there: use another store.
    """


class UnsharedRootError(StorageError):
    """Raised when the hosts of a job don't see one root, but each its own.

    Nothing was claimed; the message names the hosts.
    """


class FencedError(StepkeeperError, RuntimeError):
    """Raised when another claim owns the root: this process may write nothing more to it.

    A later start of the job, or another job that took the root over, goes on in its place. A process that this
    error ends exits with code 77.
    """


class OtherJobsRootError(FencedError):
    """Raised when the root belongs to another job. Nothing was written.

    Pass `Options(take_over=…)` to make it this job's root.
    """


class LogGapError(StepkeeperError, RuntimeError):
    """Raised when a slot of the log is gone. The log can't be trusted before the object is put back."""


class LogFormatError(StepkeeperError, ValueError):
    """Raised when a log entry is of an unknown format, or contradicts the entries before it.

    Use the newest release.
    """


class DamagedEntryError(LogFormatError):
    """Raised when a log entry isn't what was written, in several readings over fresh connections.

    The message names root, slot, object and fault. Put the object back from object versions or a copy, or let
    `stepkeeper repair` rebuild what can be proven.
    """


class ContradictedEntryError(DamagedEntryError):
    """Raised when a log entry contradicts those before it: one of them took the place of an entry that was removed.

    Attributes:
        slot: The slot of the entry that contradicts. The one before it is most likely not its own slot's.
    """

    def __init__(self, message: str, slot: int) -> None:
        super().__init__(message)
        self.slot = slot


class PinFormatError(StepkeeperError, ValueError):
    """Raised when a pin is of an unknown format, or doesn't match its name. It holds its commit all the same."""


class PinLostError(StepkeeperError, RuntimeError):
    """Raised when a pin that is to be renewed or removed is gone: its lease was over, or a person removed it.

    The commit's data may be gone too. A reader chooses a commit anew.
    """


class UnknownOutcomeError(StorageError, TimeoutError):
    """Raised when an entry may or may not be in the log, because the store didn't answer.

    Only `Log.settle` or the next append can find out.
    """


class ManifestError(StepkeeperError, ValueError):
    """Raised when the manifests of one checkpoint don't fit together, or an object isn't a manifest."""


class VerifyError(StepkeeperError, RuntimeError):
    """Raised when, after a commit, an object in the store has another size or checksum than what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBytes:
    """Bytes that were read and aren't what was written, or that aren't there."""

    path: str
    """Path of the object, relative to the root."""

    length_bytes: int
    crc32c: int
    """Checksum of these bytes as they were written."""

    offset_bytes: int = 0
    block: int | None = None
    """Number of the block in the object. None: the object as a whole, which has no other bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadItem:
    """A damaged part of another writer's checkpoint, which only a reader of that format can check."""

    folder: str
    name: str
    chunk: int | None = None
    """Number of the chunk, if the part is a tensor's."""


class TornCheckpointError(StepkeeperError, RuntimeError):
    """Raised when bytes of a committed checkpoint are bad, in several fresh reads.

    The message names the object and the block. A restore of the latest commit continues with an older one by itself;
    elsewhere, restore another step.
    """

    def __init__(self, message: str, bad: BadBytes | BadItem | None = None, *, missing: bool = False) -> None:
        super().__init__(message)
        self.bad = bad
        """The bad bytes; None if another process read them."""

        self.missing = missing
        """True if the object isn't there, as after a deletion."""


class ForeignStepsError(StepkeeperError, RuntimeError):
    """Raised when a root has no commit but steps of another writer, and none of them was chosen to go on from."""


class RestoreError(StepkeeperError, RuntimeError):
    """Raised when a commit that should be there is not, or can't be used.

    If a step was asked for, the message lists the steps that there are.
    """


class PartlyRestoredError(RestoreError):
    """Raised when a restore has failed after it had changed the state, in this rank or another one.

    The cause is chained. `step` and `save` raise it too until a restore has filled all of the state: restore the same
    step again, or another one.
    """


class BadNodeError(RestoreError):
    """Raised when a node reads bad bytes where another node reads good ones.

    The checkpoint is whole, and nothing was quarantined: replace the node.
    """


class RefusedError(StepkeeperError, RuntimeError):
    """Raised when a person asked for something that isn't safe.

    Nothing was done; the message says why, and what would be safe.
    """


class NotInPodError(StepkeeperError, RuntimeError):
    """Raised when `CheckpointManager.from_env` is called in a process that no operator has started."""


class ProcessGroupError(StepkeeperError, RuntimeError):
    """Raised when a job of several hosts has no process group over all of them.

    Call `stepkeeper.distributed.init` on all hosts first. It raises this too, if they don't find each other.
    """


class ClosedError(StepkeeperError, RuntimeError):
    """Raised when a manager is used after its `close`. Construct another one."""


class CompanionError(StepkeeperError, RuntimeError):
    """Raised when the companion process fails with an error of no known class. The message carries its traceback."""


class CompanionLostError(StepkeeperError, ConnectionError):
    """Raised when the companion process went away. The request to it failed; the next save starts another process."""

    next_save_mends = True


class PeerLostError(StepkeeperError, ConnectionError):
    """Raised when another rank did not answer in time: it is lost, or far behind."""


class NoticeDeadlineError(StepkeeperError, TimeoutError):
    """Raised when this process was told to stop, and the time for that is over before a call could end.

    What was committed stays. A process that this error ends exits with code 75.
    """


class SaveError(StepkeeperError, RuntimeError):
    """Raised when a save in the background failed. The message says which step and why, and the cause is chained."""


class StorageAwayError(SaveError):
    """Raised when a save was given up because the store gave no answer for longer than its requests are tried again.

    Nothing is wrong with the training: start it again once the store answers.
    """


UNANSWERED = (TransientStorageError, UnknownOutcomeError, StorageAwayError)
"""The errors of a store that gave no answer, however often it was asked."""


class DevicesFullError(SaveError, MemoryError):
    """Raised when the devices had no room for a save's copies, which was found out late.

    The next save makes fewer copies there.
    """

    next_save_mends = True


def text_with_notes(error: BaseException) -> str:
    """Return the text of `error` with the notes that were added to it."""
    return ", ".join([str(error), *getattr(error, "__notes__", ())])


def encode_error(error: BaseException, *, with_traceback: bool = False) -> dict[str, str]:
    """Encode `error` so that another process can raise it.

    Args:
        error: The error to encode.
        with_traceback: Also encode its traceback as text.

    Returns:
        A JSON object with `kind` (the class's name), `message`, and `traceback` if asked for.

    """
    raw = {"kind": type(error).__name__, "message": str(error)}
    if with_traceback:
        raw["traceback"] = "".join(traceback.format_exception(error))
    return raw


def decode_error(raw: dict[str, Any]) -> Exception:
    """Rebuild the error that another process encoded.

    Args:
        raw: A JSON object that `encode_error` made.

    Returns:
        An error of the same class if the class is in `stepkeeper.errors`, else a CompanionError that names the
            class.

    """
    kind = globals().get(raw["kind"])
    if isinstance(kind, type) and issubclass(kind, StepkeeperError):
        return kind(raw["message"])
    return CompanionError(f"{raw['kind']}: {raw['message']}\n{raw.get('traceback', '')}".rstrip())
