"""Define what is found out about an attempt's end."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from stepkeeper.contract import Cause

__all__ = ["CAUSE_DISRUPTION", "CAUSE_FENCED", "NO_CAUSE", "Finding", "Verdict"]

CAUSE_FENCED: Final = "Fenced"
CAUSE_DISRUPTION: Final = Cause.DISRUPTION.value
NO_CAUSE: Final = ""
"""The training is done: the end needs no cause, and has no restart."""


class Verdict(Enum):
    """The consequence of an end for the job."""

    RESTART = "restart"
    FENCED = "fenced"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The cause of an attempt's end, as far as it is known."""

    cause: str
    message: str
    node: str | None = None
    verdict: Verdict = Verdict.RESTART
    explained: bool = True
    """False: the cause is a guess, and any evidence replaces it."""
