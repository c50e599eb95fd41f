"""Which commits may go. Pure."""

import math
from collections.abc import Collection, Mapping

from stepkeeper.log.records import CommitRecord
from stepkeeper.log.state import LogState
from stepkeeper.policy.keep import Committed, KeepPolicy

__all__ = ["deletable", "metrics_of"]


def deletable(
    state: LogState,
    policy: KeepPolicy,
    verified: Collection[int] = (),
    times_unix_s: Mapping[int, float] | None = None,
) -> tuple[int, ...]:
    """Slots of the commits that `policy` doesn't keep, abandoned branches first, then oldest first.

    `verified` are commits whose objects were compared with what was written; a restored one counts too. The newest
    verified commit of HEAD's line is always kept, and HEAD, and a commit on another branch as long as the line has no
    verified commit of its step or a greater one that was made after it. Without a verified commit nothing may go.
    `times_unix_s` is when commits were put, by slot, as far as the store says.
    """
    line = state.line
    proven = [record for record in line if record.verified or record.slot in verified]
    if not proven:
        return ()
    on_line = {record.slot for record in line}
    abandoned = [
        record.slot for record in state.live if record.slot not in on_line and _is_passed(record, proven)
    ]
    kept = {line[0].slot} | {proven[0].slot}
    kept |= policy.kept([_known(record, times_unix_s or {}) for record in reversed(line)])
    return (*abandoned, *sorted(on_line - kept))


def _is_passed(abandoned: CommitRecord, proven: Collection[CommitRecord]) -> bool:
    """Whether the training has come that far again. A commit from before doesn't show that, whatever its step."""
    return any(record.slot > abandoned.slot and record.step >= abandoned.step for record in proven)


def _known(record: CommitRecord, times_unix_s: Mapping[int, float]) -> Committed:
    return Committed(
        slot=record.slot,
        step=record.step,
        time_unix_s=times_unix_s.get(record.slot),
        metrics=metrics_of(record),
    )


def metrics_of(record: CommitRecord) -> dict[str, float]:
    """What the training said of the step, as numbers."""
    return {name: _number(text) for name, text in (record.metrics or {}).items()}


def _number(text: str) -> float:
    """What isn't a number is none, and so worse than any."""
    try:
        return float(text)
    except ValueError:
        return math.nan
