"""Every error that stepkeeper raises by design, in one tree; each is also the builtin it is an instance of."""

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "BadBytes",
    "BadItem",
    "BadNodeError",
    "BadUriError",
    "ClosedError",
    "CompanionError",
    "CompanionLostError",
    "DevicesFullError",
    "FencedError",
    "ForeignStepsError",
    "LogFormatError",
    "LogGapError",
    "ManifestError",
    "MissingObjectError",
    "NotExclusiveError",
    "NotInPodError",
    "ObjectExistsError",
    "OtherJobsRootError",
    "PeerLostError",
    "PinFormatError",
    "ProcessGroupError",
    "RefusedError",
    "RestoreError",
    "SaveError",
    "StepkeeperError",
    "StorageError",
    "TornCheckpointError",
    "TransientStorageError",
    "UnknownOutcomeError",
    "UnsharedRootError",
    "VerifyError",
]


class StepkeeperError(Exception):
    """The base of all of them."""

    next_save_mends: ClassVar[bool] = False
    """A save failed with it, and the next one is expected not to: training needn't end for it."""


class BadUriError(StepkeeperError, ValueError):
    """A checkpoint URI that names no store; the message says what to write instead."""


class StorageError(StepkeeperError, OSError):
    """A store refused for good: permission, no space, no such bucket. Doing it again changes nothing."""


class TransientStorageError(StorageError):
    """A store gave no answer, or one that says later. After a put the outcome is unknown. Never means bad bytes."""


class MissingObjectError(StorageError, FileNotFoundError):
    """A store says that an object isn't there."""


class ObjectExistsError(StorageError, FileExistsError):
    """A bulk write met other bytes under its name; nothing was overwritten."""


class NotExclusiveError(StorageError):
    """In this store two writers of one name may both be told that they won: no log can live there."""


class UnsharedRootError(StorageError):
    """The hosts of a job don't see one root, but each its own. Nothing was claimed; the message names the hosts."""


class FencedError(StepkeeperError, RuntimeError):
    """Another claim owns the root: nothing more may be written by this one. Exit code 77."""


class OtherJobsRootError(FencedError):
    """The root is another job's, and nobody said to take it over. Nothing was written."""


class LogGapError(StepkeeperError, RuntimeError):
    """A slot of the log is gone. The log can't be trusted before it is put back."""


class LogFormatError(StepkeeperError, ValueError):
    """An entry is of an unknown format, or says something that the entries before it don't allow."""


class PinFormatError(StepkeeperError, ValueError):
    """A pin is of an unknown format, or isn't what its name says. It holds its commit all the same."""


class UnknownOutcomeError(StepkeeperError, TimeoutError):
    """An entry may or may not be in the log. `Log.settle` or the next append finds out; nothing else may."""


class ManifestError(StepkeeperError, ValueError):
    """Manifests of one checkpoint don't fit together, or aren't manifests."""


class VerifyError(StepkeeperError, RuntimeError):
    """After the commit, an object in the store has another size or checksum than what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBytes:
    """What was to be read, and wasn't what was written; or wasn't there."""

    path: str
    """The object, relative to the root."""

    length_bytes: int
    crc32c: int
    """Of these bytes as they were written."""

    offset_bytes: int = 0
    block: int | None = None
    """Their number in the object. None: the object as a whole, which has no other bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadItem:
    """A part of another writer's checkpoint: who reads it tells by its form."""

    folder: str
    name: str
    chunk: int | None = None
    """Of a tensor."""


class TornCheckpointError(StepkeeperError, RuntimeError):
    """Bytes of a committed checkpoint were read bad, in several fresh reads. Names the object and the block."""

    def __init__(self, message: str, bad: BadBytes | BadItem | None = None, *, missing: bool = False) -> None:
        super().__init__(message)
        self.bad = bad
        """Which bytes; None where they were another process's to read."""

        self.missing = missing
        """True: no object is there. A deletion leaves nothing else behind."""


class BadNodeError(StepkeeperError, RuntimeError):
    """A node reads bad bytes where another one reads good ones: the checkpoint is whole. Nothing was condemned."""


class ForeignStepsError(StepkeeperError, RuntimeError):
    """Nothing is committed in a root with steps of another writer, and none of them was chosen to go on from."""


class RestoreError(StepkeeperError, RuntimeError):
    """A commit that was meant to be found isn't there or can't be used."""


class RefusedError(StepkeeperError, RuntimeError):
    """What a person asked for isn't safe, and nothing was done. The message says why, and what would be."""


class NotInPodError(StepkeeperError, RuntimeError):
    """`CheckpointManager.from_env` was called where no operator has said who this process is."""


class ProcessGroupError(StepkeeperError, RuntimeError):
    """A job of several hosts has no process group over all of them."""


class ClosedError(StepkeeperError, RuntimeError):
    """A manager was used after its `close`."""


class CompanionError(StepkeeperError, RuntimeError):
    """The companion process failed in a way that it has no name for; the message carries its traceback."""


class CompanionLostError(StepkeeperError, ConnectionError):
    """The companion process went away. What was asked of it failed; the next save starts another one."""

    next_save_mends = True


class PeerLostError(StepkeeperError, ConnectionError):
    """Another rank did not answer in time: lost, or far behind."""


class SaveError(StepkeeperError, RuntimeError):
    """A save in the background failed; the message says which step and why. Its cause is chained."""


class DevicesFullError(SaveError, MemoryError):
    """The devices had no room for a save's copies, which was found out late. The next save makes fewer there."""

    next_save_mends = True
