"""Define the decision about one object of any kind, its events and its waits. The kind's applier carries it out."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

__all__ = ["KindDecision", "ObjectEvent", "compute_write_wait_s", "find_soonest"]

_SHORTEST_WAIT_S: Final = 0.05

StatusT = TypeVar("StatusT")
ActionT = TypeVar("ActionT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEvent:
    """A Kubernetes event about an object, for people."""

    warning: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDecision(Generic[StatusT, ActionT]):
    """The result of a reconcile: the new status, the actions, and when to reconcile again."""

    status: StatusT
    write_status: bool = False
    """Write the status, before the actions: they use the names and numbers that it stores."""

    actions: tuple[ActionT, ...] = ()
    events: tuple[ObjectEvent, ...] = ()
    """Events to create once the status is written."""

    requeue_after_s: float | None = None


def find_soonest(*waits_s: float | None) -> float | None:
    """Return the shortest wait, but at least 50 ms. None: there is nothing to wait for."""
    known = [wait_s for wait_s in waits_s if wait_s is not None]
    return max(_SHORTEST_WAIT_S, min(known)) if known else None


def compute_write_wait_s(interval_s: float, *, last_write_at: float, now: float) -> float:
    """Compute the seconds until the next write, at most one in `interval_s`; 0: now, also if the clock was set back."""
    since_s = now - last_write_at
    return interval_s - since_s if 0 <= since_s < interval_s else 0.0
