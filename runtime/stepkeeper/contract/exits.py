"""Define the exit codes of a trainer process, and the causes of an attempt's end."""

from enum import IntEnum, StrEnum
from typing import Final

__all__ = ["END_RESERVE_S", "Cause", "EndKind", "ExitCode", "NoticeSource"]

END_RESERVE_S: Final = 1.5
"""Seconds of the grace period that a trainer reserves for its last report and the interpreter's exit. No save may use
them."""


class ExitCode(IntEnum):
    """Exit codes with a meaning; every other code but 0 is a failure of the application."""

    DONE = 0
    """The whole training is done. No rank exits 0 before all ranks are done."""

    SAVED = 75
    """The process stopped for a notice. Its last step is committed, or no save was possible or needed. Restart it."""

    FENCED = 77
    """Another claim owns the root. This process wrote nothing more, and is never restarted."""

    PEER_LOST = 78
    """Another rank is lost. This is never a failure by itself: the lost rank has the cause."""


class NoticeSource(StrEnum):
    """The source of a request to save and stop."""

    SIGTERM = "sigterm"
    FILE = "file"
    """The trigger file appeared."""

    DIRECTIVE = "directive"
    """The operator, in its answer to a report."""

    PREEMPTED = "preempted"
    """The cloud announced that it preempts the machine."""

    CALL = "call"
    """The program, by `request_stop`."""

    PEER = "peer"
    """Another rank got a request."""


class EndKind(StrEnum):
    """The kind of a process's end, as its termination message reports it. Later versions may add members."""

    STOPPING = "stopping"
    """It was asked to stop, and was killed before it had stopped."""

    SAVED = "saved"
    """It was asked to stop, and everything that had to be saved is committed."""

    GAVE_UP = "gaveUp"
    """It was asked to stop, and its last step isn't saved: `decision` or `error` has the reason."""

    DONE = "done"
    FENCED = "fenced"
    PEER_LOST = "peerLost"
    FAILED = "failed"
    """An exception ended it, or it exited with its own code."""

    KILLED = "killed"
    """A signal ended it."""

    @classmethod
    def of(cls, code: int) -> "EndKind":
        """Return the kind of an end of which only the exit code is known."""
        kinds: dict[int, EndKind] = {
            ExitCode.DONE: cls.DONE,
            ExitCode.SAVED: cls.SAVED,
            ExitCode.FENCED: cls.FENCED,
            ExitCode.PEER_LOST: cls.PEER_LOST,
        }
        return kinds.get(code, cls.FAILED)


class Cause(StrEnum):
    """The cause of an attempt's end.

    Later versions may add members. A reader treats an unknown cause as a Disruption.
    """

    APPLICATION_ERROR = "ApplicationError"
    SPOT_PREEMPTION = "SpotPreemption"
    QUEUE_PREEMPTION = "QueuePreemption"
    SCHEDULER_PREEMPTION = "SchedulerPreemption"
    MAINTENANCE = "Maintenance"
    NODE_FAILURE = "NodeFailure"
    EVICTION = "Eviction"
    DISRUPTION = "Disruption"
    """A disruption with no more specific cause."""

    STORAGE_UNAVAILABLE = "StorageUnavailable"
    """The checkpoint store didn't answer for longer than the process could wait."""

    HANG = "Hang"
    """The training made no progress, and was ended for that."""

    REQUESTED = "Requested"
    """A person or a program asked the pods to stop, or deleted one."""
