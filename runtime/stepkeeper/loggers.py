# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""Make this package's loggers: Python's own, below `stepkeeper`, with the attempt and the rank in their records."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

__all__ = ["identify", "logger", "run_briefly", "show_by_default"]

_PACKAGE: Final = "stepkeeper"
_FORMAT: Final = "%(asctime)s %(levelname)s stepkeeper (rank %(rank)s, start %(attempt)s): %(message)s"
_BRIEF_S: Final = 0.2
_identity: Final[dict[str, Any]] = {"attempt": None, "rank": None}


def logger(name: str) -> logging.Logger:
    """Return Python's logger `name`, whose records have `step`, `attempt` and `rank`.

    `step` is the record's step if the call passes one in `extra`, else None.
    """
    named = logging.getLogger(name)
    named.addFilter(_add_identity)
    return named


def identify(*, rank: int, attempt: str | None) -> None:
    """Set the rank, and the operator's number of this start, that this process's log records carry.

    A manager beside the job's own, for evaluation for example, has no such number and changes nothing.
    """
    if attempt is not None or _identity["attempt"] is None:
        _identity.update(attempt=attempt, rank=rank)


def show_by_default() -> None:
    """Write this package's records, from INFO on, to stderr, unless the program has configured logging itself.

    A handler or a level of the program, on the root logger or on `stepkeeper`, takes precedence, even if set later.
    """
    package = logging.getLogger(_PACKAGE)
    if package.level != logging.NOTSET or package.hasHandlers():
        return
    handler = _DefaultHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    package.addHandler(handler)
    package.setLevel(logging.INFO)


def run_briefly(*calls: Callable[[], object]) -> None:
    """Run each of `calls` in its own thread, and continue after a fifth of a second even if one hangs.

    The program chooses the outputs of log handlers, and one may be on a hanging file system. Threads that watch or end
    the process must not hang with it.
    """
    ends_s = time.monotonic() + _BRIEF_S
    threads = [threading.Thread(target=call, name="stepkeeper-brief", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends_s - time.monotonic()))


class _DefaultHandler(logging.StreamHandler[TextIO]):
    """Write to stderr as long as the root logger has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _add_identity(record: logging.LogRecord) -> bool:
    for name, value in ({"step": None} | _identity).items():
        record.__dict__.setdefault(name, value)
    if record.__dict__["rank"] is None:
        record.__dict__["rank"] = _process_group_rank()
    return True


def _process_group_rank() -> int | None:
    """Read the rank from torch's default process group, if there is no manager; None without a group."""
    group = sys.modules.get("torch.distributed")
    is_there = group is not None and group.is_available() and group.is_initialized()
    return int(group.get_rank()) if group is not None and is_there else None
