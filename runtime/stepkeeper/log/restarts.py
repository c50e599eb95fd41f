"""Estimate how often a training is disrupted, from the log of its root and from how long the training has gone on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stepkeeper.errors import LogFormatError, StorageError
from stepkeeper.log import BeginEntry, Entry
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.loggers import logger

__all__ = ["RestartHistory", "read_restart_history"]

_log: Final = logger(__name__)
_MOST: Final = 16
"""The most begins that are looked back at: two small reads each, while the training starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """The past of a training, up to a claim of its root."""

    restarts: int
    """The number of times that a process has gone on from where another one had ended."""

    over_s: int | None
    """The seconds over which these happened. None: the store doesn't say when things were put."""


def read_restart_history(
    entry: Callable[[int], Entry], times: StoreTimes, claim: int
) -> RestartHistory | None:
    """Read the past of the job that `claim` is of. If the log can't be read, warn and return None."""
    try:
        restarts, first = _restarts_before(entry, claim)
    except (StorageError, LogFormatError) as error:  # the claim stands without it: it is for an estimate only
        _log.warning("how often this training was restarted can't be told: %s", error)
        return None
    return RestartHistory(restarts=restarts, over_s=times.between_s(first, claim) if restarts else 0)


def _restarts_before(entry: Callable[[int], Entry], claim: int) -> tuple[int, int]:
    """Count the restarts of the claim's job, and return with the count the slot of the begin that it counts from."""
    restarts, first, begin = 0, claim, _begin_in(entry(claim))
    for _ in range(_MOST):
        if first == 0:
            break
        before = entry(first - 1)
        earlier = _begin_in(entry(before.claim))
        if _job_of(earlier) != _job_of(begin):
            break
        restarts += _is_restart(begin, earlier, before.after.head)
        first, begin = before.claim, earlier
    return restarts, first


def _is_restart(begin: BeginEntry, earlier: BeginEntry, head: int | None) -> bool:
    """Tell whether `begin` goes on from where `earlier` had come to, which is `head`.

    It doesn't if somebody chose its base, or if both are claims of one start.
    """
    if begin.scratch or (begin.owner is not None and begin.owner == earlier.owner):
        return False
    return begin.base == head and (head is not None or begin.legacy == earlier.legacy)


def _job_of(begin: BeginEntry) -> str | None:
    return None if begin.owner is None else begin.owner.name


def _begin_in(entry: Entry) -> BeginEntry:
    assert isinstance(entry.body, BeginEntry), "a claim is the slot of a begin"
    return entry.body
