"""Define how an attempt of `stepkeeper rehearse` ends itself, and the files in its folder."""

from dataclasses import dataclass
from typing import Final

__all__ = ["PREEMPTED_FILE_NAME", "REHEARSAL_FILE_NAME", "Rehearsal", "metrics_file_name"]

REHEARSAL_FILE_NAME: Final = "rehearsal.json"
PREEMPTED_FILE_NAME: Final = "preempted"
"""A file whose existence shows that the attempt was preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """One attempt of a rehearsal. Its ranks record the metrics of all steps, and one of them is preempted."""

    step: int | None = None
    """The first finished step at which a rank is preempted; None: the attempt isn't disturbed."""

    rank: int = 0
    """The rank, modulo the number of ranks."""

    kills: bool = False
    """True to end the process by SIGKILL. False sends it SIGTERM, and SIGKILL `grace_s` seconds later."""

    grace_s: int = 30


def metrics_file_name(rank: int) -> str:
    """Return the name of the file in which a rank records its steps.

    Each line is a JSON list: the step, and its metrics by name.
    """
    return f"metrics.{rank}.jsonl"
