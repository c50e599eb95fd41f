"""Define every error that stepkeeper raises by design, and carry errors from one process to another.

All of them derive from StepkeeperError, and each also from the matching builtin exception. The classes that a training
may want to catch are names of `stepkeeper` itself.
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

    next_save_recovers: ClassVar[bool] = False
    """True if the next save is expected to succeed after this error, so that training need not end."""


class BadUriError(StepkeeperError, ValueError):
    """Raised when a checkpoint URI or path names no store. The message has the correct form."""


class StorageError(StepkeeperError, OSError):
    """Raised when a store refuses permanently: no permission, no space, no such bucket.

    A retry doesn't help: fix the cause that the message names.
    """


class TransientStorageError(StorageError):
    """Raised when a store didn't answer, or asked to retry later. Operations with retries raise it at their time limit.

    After a put the outcome is unknown. This error never means bad bytes. Retry later.
    """


class NoAccessError(StorageError, PermissionError):
    """Raised when a bucket can't be used: no credentials, no permission, or no bucket of that name.

    It is raised at once, since a retry doesn't help. The message names the bucket and the fix.
    """


class MissingObjectError(StorageError, FileNotFoundError):
    """Raised when an object isn't in the store."""


class ObjectExistsError(StorageError, FileExistsError):
    """Raised when a write finds other bytes under its name. Nothing was overwritten; use another folder."""


class NotExclusiveError(StorageError):
    """Raised when a store may let two writers both create one name.

    No log can work there: use another store.
    """


class UnsharedRootError(StorageError):
    """Raised when the hosts of a job don't share the root.

    Nothing was claimed. The message names the hosts.
    """


class FencedError(StepkeeperError, RuntimeError):
    """Raised when another claim owns the root: this process may write nothing more to it.

    A later start of the job, or another job that took over the root, continues in its place. A process that this error
    ends exits with code 77.
    """


class OtherJobsRootError(FencedError):
    """Raised when the root belongs to another job. Nothing was written.

    Pass `Options(take_over=…)` to make it this job's root.
    """


class LogGapError(StepkeeperError, RuntimeError):
    """Raised when a slot of the log is missing. The log can't be trusted until the object is restored."""


class LogFormatError(StepkeeperError, ValueError):
    """Raised when a log entry has an unknown format, or contradicts earlier entries.

    Use the newest release.
    """


class DamagedEntryError(LogFormatError):
    """Raised when a log entry is corrupt, in several reads over fresh connections.

    The message names the root, slot, object and fault. Restore the object from object versions or a copy, or run
    `stepkeeper repair` to rebuild the provable part.
    """


class ContradictedEntryError(DamagedEntryError):
    """Raised when a log entry contradicts earlier ones: one of them replaced an entry that was removed.

    Attributes:
        slot: The slot of the contradicting entry. The entry before it is most likely the wrong one.
    """

    def __init__(self, message: str, slot: int) -> None:
        super().__init__(message)
        self.slot = slot


class PinFormatError(StepkeeperError, ValueError):
    """Raised when a pin has an unknown format, or doesn't match its name. It protects its commit all the same."""


class PinLostError(StepkeeperError, RuntimeError):
    """Raised when a pin to renew or remove is gone: its lease had expired, or a user removed it.

    The commit's data may be gone too. Choose a commit again.
    """


class UnknownOutcomeError(StorageError, TimeoutError):
    """Raised when an entry may or may not be in the log, because the store didn't answer.

    Only `Log.settle` or the next append can find out.
    """


class ManifestError(StepkeeperError, ValueError):
    """Raised when the manifests of one checkpoint don't fit together, or an object isn't a manifest."""


class VerifyError(StepkeeperError, RuntimeError):
    """Raised when, after a commit, an object in the store has another size or checksum than the written bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBytes:
    """Bytes that differ from the written ones, or are missing."""

    path: str
    """Path of the object, relative to the root."""

    length_bytes: int
    crc32c: int
    """Checksum of the written bytes."""

    offset_bytes: int = 0
    block: int | None = None
    """Number of the block in the object; None for the whole object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadItem:
    """A corrupt part of another writer's checkpoint, which only a reader of that format can check."""

    folder: str
    name: str
    chunk: int | None = None
    """Number of the chunk, if the part belongs to a tensor."""


class TornCheckpointError(StepkeeperError, RuntimeError):
    """Raised when bytes of a committed checkpoint are bad, in several fresh reads.

    The message names the object and the block. A restore of the latest commit falls back to an older one by itself.
    After other calls, restore another step.
    """

    def __init__(self, message: str, bad: BadBytes | BadItem | None = None, *, missing: bool = False) -> None:
        super().__init__(message)
        self.bad = bad
        """The bad bytes; None if another process read them."""

        self.missing = missing
        """True if the object is missing, as after a deletion."""


class ForeignStepsError(StepkeeperError, RuntimeError):
    """Raised when a root has another writer's steps but no commit, and no step was chosen to continue from."""


class RestoreError(StepkeeperError, RuntimeError):
    """Raised when an expected commit is missing or can't be used.

    If a step was requested, the message lists the existing steps.
    """


class PartlyRestoredError(RestoreError):
    """Raised when a restore failed after it had changed the state, in this rank or another one.

    The cause is chained. `step` and `save` raise it too until a restore has filled all of the state. Restore the same
    step again, or another one.
    """


class BadNodeError(RestoreError):
    """Raised when a node reads bad bytes where another node reads good ones.

    The checkpoint is intact, and nothing was quarantined. Replace the node.
    """


class RefusedError(StepkeeperError, RuntimeError):
    """Raised when a requested operation isn't safe.

    Nothing was done. The message has the reason and a safe alternative.
    """


class NotInPodError(StepkeeperError, RuntimeError):
    """Raised when `CheckpointManager.from_env` is called in a process that the operator didn't start."""


class ProcessGroupError(StepkeeperError, RuntimeError):
    """Raised when a job of several hosts has no process group over all of them.

    Call `stepkeeper.distributed.init` on all hosts first. It raises this too if the hosts can't connect.
    """


class ClosedError(StepkeeperError, RuntimeError):
    """Raised when a manager is used after its `close`. Construct another one."""


class CompanionError(StepkeeperError, RuntimeError):
    """Raised when the companion process fails with an error of an unknown class. The message has its traceback."""


class CompanionLostError(StepkeeperError, ConnectionError):
    """Raised when the companion process is lost. The request failed; the next save starts another process."""

    next_save_recovers = True


class PeerLostError(StepkeeperError, ConnectionError):
    """Raised when another rank did not answer in time: it is lost or far behind."""


class NoticeDeadlineError(StepkeeperError, TimeoutError):
    """Raised when a notice's deadline comes before a call has ended.

    Committed data stays. A process that this error ends exits with code 75.
    """


class SaveError(StepkeeperError, RuntimeError):
    """Raised when a background save failed. The message names the step and the reason, and the cause is chained."""


class StorageAwayError(SaveError):
    """Raised when a save was given up because the store didn't answer within the time for retries.

    The training isn't at fault: restart it once the store answers.
    """


UNANSWERED = (TransientStorageError, UnknownOutcomeError, StorageAwayError)
"""The errors of a store that didn't answer in spite of retries."""


class DevicesFullError(SaveError, MemoryError):
    """Raised when the devices turned out to have no room for a save's copies.

    The next save makes fewer copies there.
    """

    next_save_recovers = True


class CopiesDifferError(SaveError):
    """Raised when ranks hold different copies of a tensor in a save that was divided among them.

    The next save compares the copies first. It is written from the first rank, or refused with the reason.
    """

    next_save_recovers = True


def text_with_notes(error: BaseException) -> str:
    """Return the text of `error` with the notes that were added to it."""
    return ", ".join([str(error), *getattr(error, "__notes__", ())])


def encode_error(error: BaseException, *, with_traceback: bool = False) -> dict[str, str]:
    """Encode `error` as a JSON object, so that another process can raise it."""
    raw = {"kind": type(error).__name__, "message": str(error)}
    if with_traceback:
        raw["traceback"] = "".join(traceback.format_exception(error))
    return raw


def decode_error(raw: dict[str, Any]) -> Exception:
    """Rebuild an error that another process encoded: one of this module's classes, else a CompanionError."""
    # Another name, as of a builtin error, is no class of this module.
    kind = globals().get(raw["kind"])
    if isinstance(kind, type) and issubclass(kind, StepkeeperError):
        return kind(raw["message"])
    return CompanionError(f"{raw['kind']}: {raw['message']}\n{raw.get('traceback', '')}".rstrip())
