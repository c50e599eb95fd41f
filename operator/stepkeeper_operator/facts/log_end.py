"""Pick what tells most from the end of a program's log, which the kubelet hands over where it left no message."""

import re
from typing import Final

__all__ = ["pick_last_words"]

_LIMIT: Final = 500
"""Characters that are kept: a thousand jobs of sixteen pods have to fit in memory."""

_N_LINES: Final = 3
_RANK: Final = re.compile(r"^(\[[A-Za-z]*\d+\]:\s?)+")
"""What torch and torchrun write ahead of the lines of a rank."""

_TRACEBACK: Final = "Traceback (most recent call last):"
_LAUNCHER: Final = "ChildFailedError"
"""The error by which torchrun says that a process that it started has failed."""


def pick_last_words(text: str) -> str:
    """Return the last line of the last traceback, then the last lines of the log. Empty if there are none."""
    lines = [_RANK.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    if not lines:
        return ""
    error = _find_error(lines) or lines[-1].strip()
    rest = [line.strip() for line in lines[-_N_LINES:] if line.strip() != error]
    return (f"{error} (its log ends with: {' | '.join(rest)})" if rest else error)[:_LIMIT]


def _find_error(lines: list[str]) -> str | None:
    """Find the line below the last traceback that names its error. A launcher's own comes last and says less."""
    errors: list[str] = []
    within = False
    for line in lines:
        if line.strip().endswith(_TRACEBACK):
            within = True
        elif within and not line[0].isspace() and not line.lstrip().startswith("|"):
            errors.append(line.strip())
            within = False
    own = [error for error in errors if _LAUNCHER not in error]
    return next(iter(reversed(own or errors)), None)
