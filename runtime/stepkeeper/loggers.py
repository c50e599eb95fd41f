"""The loggers of this package: each is Python's own, below `stepkeeper`, and each record says whose it is."""

import logging
import sys
from typing import Any, Final

__all__ = ["identify", "logger"]

_identity: Final[dict[str, Any]] = {"attempt": None, "rank": None}


def logger(name: str) -> logging.Logger:
    """Python's logger `name`. Its records have `step`, `attempt` and `rank`, for handlers that write them.

    `step` is the one that the record is about, where `extra` says that; else None.
    """
    named = logging.getLogger(name)
    named.addFilter(_add_identity)
    return named


def identify(*, rank: int, attempt: str | None) -> None:
    """Records of this process are of `rank` and of `attempt`, the operator's number of this start, from now on.

    A manager beside the job's own, which evaluates for one, has no attempt to tell, and changes nothing.
    """
    if attempt is not None or _identity["attempt"] is None:
        _identity.update(attempt=attempt, rank=rank)


def _add_identity(record: logging.LogRecord) -> bool:
    for name, value in ({"step": None} | _identity).items():
        record.__dict__.setdefault(name, value)
    if record.__dict__["rank"] is None:
        record.__dict__["rank"] = _process_group_rank()
    return True


def _process_group_rank() -> int | None:
    """Where no manager was made; None where there is no process group either."""
    group = sys.modules.get("torch.distributed")
    is_there = group is not None and group.is_available() and group.is_initialized()
    return int(group.get_rank()) if group is not None and is_there else None
