"""Log after the first commit of a training how many more such steps its disk has room for. A bucket's is unknown."""

import logging
import os
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from stepkeeper.loggers import logger
from stepkeeper.policy.keep import AnyOf, BestN, KeepPolicy, LastN
from stepkeeper.quantities import size_text

__all__ = ["count_kept", "log_room"]

_log: Final = logger("stepkeeper")


def log_room(uri: str, size_bytes: int, keep: KeepPolicy | None) -> None:
    """Log for how many more steps of `size_bytes` the disk of a file:// root has room, and how many are kept.

    A warning says that the disk becomes full by the retention alone. Other roots and empty commits log nothing.
    """
    parts = urlsplit(uri)
    if parts.scheme != "file" or size_bytes == 0:
        return
    disk = os.statvfs(url2pathname(parts.path))
    n_more = disk.f_bavail * disk.f_frsize // size_bytes
    n_kept = None if keep is None else count_kept(keep)
    text = "the disk of %s has room for %d more steps like this one (%s), and %s"
    # A step is deleted after the commit of the one that replaces it: there is one more for a while.
    if n_kept is not None and n_more < n_kept:
        level, end = (
            logging.WARNING,
            f"retention keeps {n_kept}: it will be full; keep fewer, or use another disk",
        )
    else:
        level, end = (
            logging.INFO,
            "retention does not limit their number" if n_kept is None else f"retention keeps {n_kept}",
        )
    _log.log(level, text, uri, n_more, size_text(size_bytes), end)


def count_kept(policy: KeepPolicy) -> int | None:
    """Return how many commits the policy keeps at most; None if there is no such number."""
    match policy:
        case LastN(n=n):
            return n
        case BestN(n=n, keep_without=False):
            return n
        case AnyOf(policies=policies):
            counts = [count_kept(each) for each in policies]
            known = [each for each in counts if each is not None]
            return sum(known) if len(known) == len(counts) else None
        case _:
            return None
