"""Leave the last word of a process that a signal has ended: it has left none."""

import signal
from pathlib import Path
from typing import Final

from stepkeeper.contract import CommitPoint, Identity, Termination
from stepkeeper.process_end.last_words import count_restarts, leave_word_for_another

__all__ = ["leave_word_of_killed"]

_BY_SIGNAL: Final = 128
"""Added to a signal's number, makes the exit code that shells and the kubelet give to a process which it ended."""


def leave_word_of_killed(
    pod: Identity, rank: int, number: int, *, step: int | None, restored: CommitPoint | None
) -> None:
    """Leave the last word of a rank that a signal has ended, where the kubelet looks for it.

    Args:
        pod: The rank's pod.
        rank: The rank.
        number: The signal's number.
        step: The last step that the rank has finished.
        restored: The commit that it restored last.

    """
    word = Termination(
        code=_BY_SIGNAL + number,
        step=step,
        restored=restored,
        error=f"rank {rank} was ended by signal {number} ({_name_of(number)})",
        rank=rank,
        restart=count_restarts(),
    )
    leave_word_for_another(Path(pod.termination_file), word)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # One between SIGRTMIN and SIGRTMAX.
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
