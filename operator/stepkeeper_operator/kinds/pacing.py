"""Say how long to wait before the next look, and before the next write of a status, for every kind. Pure."""

from typing import Final

__all__ = ["compute_write_wait_s", "find_soonest"]

_SHORTEST_WAIT_S: Final = 0.05


def find_soonest(*waits_s: float | None) -> float | None:
    """Return the shortest wait, but not less than a moment. None: there is nothing to wait for."""
    known = [wait_s for wait_s in waits_s if wait_s is not None]
    return max(_SHORTEST_WAIT_S, min(known)) if known else None


def compute_write_wait_s(interval_s: float, *, last_write_at: float, now: float) -> float:
    """Compute the seconds until a status may be written that is to be written once in `interval_s`; 0: it may be now.

    After the clock went back nobody knows how long ago the last write was, and it may be.
    """
    since_s = now - last_write_at
    return interval_s - since_s if 0 <= since_s < interval_s else 0.0
