"""Name the exit codes of a trainer process, and the causes for which an attempt ends."""

from enum import IntEnum, StrEnum
from typing import Final

__all__ = ["END_RESERVE_S", "Cause", "EndKind", "ExitCode", "NoticeSource"]

END_RESERVE_S: Final = 1.5
"""Seconds of the grace period that a trainer keeps for the last report and the interpreter's own end: no save gets
them."""


class ExitCode(IntEnum):
    """Exit codes with a meaning; every other code but 0 is a failure of the application."""

    DONE = 0
    """The whole training is done. No rank exits 0 before all are."""

    SAVED = 75
    """A notice came, and a checkpoint is committed (or there was nothing to save): restart me."""

    FENCED = 77
    """Another claim owns the root: this process wrote nothing more. Never restarted."""

    PEER_LOST = 78
    """Another rank went away. It is never a failure by itself: the rank that went away has the cause."""


class NoticeSource(StrEnum):
    """Something that asks a process to save and stop."""

    SIGTERM = "sigterm"
    FILE = "file"
    DIRECTIVE = "directive"
    PREEMPTED = "preempted"
    """The cloud has announced that it preempts the machine."""

    CALL = "call"
    """The program, by `request_stop`."""

    PEER = "peer"
    """Another rank was asked."""


class EndKind(StrEnum):
    """The end of a process of the training, as its termination message reports it. There may be more."""

    STOPPING = "stopping"
    """It was asked to stop, and hadn't stopped yet when it was killed."""

    SAVED = "saved"
    """It was asked to stop, and everything that was to be saved for that is committed."""

    GAVE_UP = "gaveUp"
    """It was asked to stop, and its last step isn't saved: `decision` or `error` has the reason."""

    DONE = "done"
    FENCED = "fenced"
    PEER_LOST = "peerLost"
    FAILED = "failed"
    """An exception ended it, or it ended itself with a code of its own."""

    KILLED = "killed"
    """A signal ended it."""

    @classmethod
    def of(cls, code: int) -> "EndKind":
        """Return the kind of an end with `code`, where nothing more is known of it."""
        kinds: dict[int, EndKind] = {
            ExitCode.DONE: cls.DONE,
            ExitCode.SAVED: cls.SAVED,
            ExitCode.FENCED: cls.FENCED,
            ExitCode.PEER_LOST: cls.PEER_LOST,
        }
        return kinds.get(code, cls.FAILED)


class Cause(StrEnum):
    """The cause for which an attempt ended.

    There may be more: a reader takes a cause that it doesn't know for a Disruption.
    """

    APPLICATION_ERROR = "ApplicationError"
    SPOT_PREEMPTION = "SpotPreemption"
    QUEUE_PREEMPTION = "QueuePreemption"
    SCHEDULER_PREEMPTION = "SchedulerPreemption"
    MAINTENANCE = "Maintenance"
    NODE_FAILURE = "NodeFailure"
    EVICTION = "Eviction"
    DISRUPTION = "Disruption"
    """A disruption of which nothing more is known."""

    STORAGE_UNAVAILABLE = "StorageUnavailable"
    """The store of the checkpoints gave no answer for longer than the process could wait for one."""

    HANG = "Hang"
    REQUESTED = "Requested"
