"""Hold what a save policy knows at a finished step. `policy.save` has these names too."""

from dataclasses import dataclass

__all__ = ["Disruptions", "Moment", "SaveCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """The measured cost of this process's saves so far."""

    stall_s: float
    """Seconds that the train thread waited for one save."""

    duration_s: float
    """Seconds from the call to the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruptions:
    """Number of times that this training was ended from outside, as far as it is known."""

    count: int = 0
    """Number of disruptions."""

    over_s: float = 0.0
    """Length, in seconds, of the time in which they were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A finished step, and what is known at it.

    The defaults are what every rank knows without asking the others.
    """

    step: int
    """The finished step."""

    stopping: bool = False
    """True if all ranks agreed to stop at this step, and it isn't being saved yet."""

    since_save_s: float = 0.0
    """Seconds since the last save started, or the training did."""

    saving: bool = True
    """True if a save is in flight."""

    cost: SaveCost | None = None
    """The measured cost of saves; None before the first has ended."""

    disruptions: Disruptions = Disruptions()
    """The disruptions of this training so far."""
