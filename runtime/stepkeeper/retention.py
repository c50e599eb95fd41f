"""Which commits may go. Pure."""

from collections.abc import Collection

from stepkeeper.contract import Retention
from stepkeeper.log.state import LogState

__all__ = ["deletable"]


def deletable(state: LogState, retention: Retention, verified: Collection[int] = ()) -> tuple[int, ...]:
    """Slots of the commits that `retention` doesn't keep, abandoned branches first, then oldest first.

    `verified` are commits whose objects were compared with what was written; a restored one counts too. The newest
    verified commit of HEAD's line is always kept, and a commit on another branch as long as the line has no verified
    commit of its step or a later one. Without a verified commit nothing may go.
    """
    line = state.line
    proven = [record for record in line if record.verified or record.slot in verified]
    if not proven:
        return ()
    on_line = {record.slot for record in line}
    greatest_step = max(record.step for record in proven)
    abandoned = [
        record.slot for record in state.live if record.slot not in on_line and record.step <= greatest_step
    ]
    every = retention.every_steps
    kept = {record.slot for record in line[: max(retention.last, 1)]} | {proven[0].slot}
    kept |= {record.slot for record in line if every and record.step % every == 0}
    return (*abandoned, *sorted(on_line - kept))
