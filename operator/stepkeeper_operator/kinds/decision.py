"""Define the decision about one object of any kind. The kind's applier carries it out in its order."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from stepkeeper_operator.events import ObjectEvent

__all__ = ["KindDecision"]

StatusT = TypeVar("StatusT")
ActionT = TypeVar("ActionT")


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDecision(Generic[StatusT, ActionT]):
    """The result of a reconcile: the new status, what to do, and when to look again."""

    status: StatusT
    write_status: bool = False
    """Write the status. It is written first: the actions use the names and numbers that it keeps."""

    actions: tuple[ActionT, ...] = ()
    events: tuple[ObjectEvent, ...] = ()
    """Events to create once the status is written."""

    requeue_after_s: float | None = None
