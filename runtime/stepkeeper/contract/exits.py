"""How a trainer process says what became of it, and why an attempt ended."""

from enum import IntEnum, StrEnum

__all__ = ["Cause", "ExitCode"]


class ExitCode(IntEnum):
    """Exit codes with a meaning; every other code but 0 is a failure of the application."""

    DONE = 0
    """The whole training is done. No rank exits 0 before all are."""

    SAVED = 75
    """A notice came, a checkpoint is committed (or there was nothing to save): restart me."""

    FENCED = 77
    """Another claim owns the root: this process wrote nothing more. Never restarted."""

    PEER_LOST = 78
    """Another rank went away. Never a failure by itself: the rank that went away has the cause."""


class Cause(StrEnum):
    """Why an attempt ended. Open for more: a reader takes a cause that it doesn't know for a Disruption."""

    APPLICATION_ERROR = "ApplicationError"
    SPOT_PREEMPTION = "SpotPreemption"
    QUEUE_PREEMPTION = "QueuePreemption"
    SCHEDULER_PREEMPTION = "SchedulerPreemption"
    MAINTENANCE = "Maintenance"
    NODE_FAILURE = "NodeFailure"
    EVICTION = "Eviction"
    DISRUPTION = "Disruption"
    """One that nobody saw closer."""

    HANG = "Hang"
    REQUESTED = "Requested"
