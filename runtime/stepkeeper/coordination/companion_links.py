"""Tell the companions of all ranks the way to rank 0's, once, when all ranks have met."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper.loggers import logger
from stepkeeper.stacks.meeting import StackMeeting

__all__ = ["link_companions"]

_log: Final = logger(__name__)
_ADDRESS_S: Final = 300.0


def link_companions(
    group: RankGroup, meeting: StackMeeting, link: Callable[[Mapping[str, Any]], None]
) -> None:
    """Give this rank's companion the address of rank 0's. A failure is logged: training goes on without.

    Ranks: all ranks call this, when all have met.

    Args:
        group: The ranks that train together.
        meeting: Where the companions meet.
        link: Connects this rank's companion; rank 0's, which is called, doesn't need it.

    """
    # An empty dict says that there is no way: no rank is to wait for one.
    own = (meeting.describe(group.store_host) or {}) if group.rank == 0 else None
    try:
        address = group.broadcast("companions", own, _ADDRESS_S)
    except (PeerLostError, NoticeDeadlineError) as error:
        _log.warning("a request for stacks doesn't reach all ranks: %s", error)
        return
    if group.rank != 0 and address:
        link(address)
