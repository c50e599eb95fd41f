"""Choose the commits that may be deleted. Pure."""

import math
from collections.abc import Collection, Mapping

from stepkeeper.log.records import CommitRecord
from stepkeeper.log.state import LogState
from stepkeeper.policy.keep import Committed, KeepPolicy

__all__ = ["choose_deletable", "metrics_of"]


def choose_deletable(
    state: LogState,
    policy: KeepPolicy,
    verified: Collection[int],
    times_unix_s: Mapping[int, float] | None = None,
) -> tuple[int, ...]:
    """Choose the commits that may be deleted, by slot: those on abandoned branches, then the oldest ones.

    HEAD, the newest verified commit of its line, and the line's commits that `policy` selects are kept. A commit on
    another branch is kept until the line has a later, verified commit of the same step or a greater one. Nothing may be
    deleted without a verified commit, or by a claim that has yet to begin a branch. A commit is verified if it was
    restored, or is in `verified`: its objects were compared with the written bytes.
    """
    line = () if state.branching else state.line
    proven = [record for record in line if record.verified or record.slot in verified]
    if not proven:
        return ()
    on_line = {record.slot for record in line}
    abandoned = [
        record.slot for record in state.live if record.slot not in on_line and _is_passed(record, proven)
    ]
    kept = {line[0].slot, proven[0].slot}
    kept |= policy.kept([_known(record, times_unix_s or {}) for record in reversed(line)])
    return (*abandoned, *sorted(on_line - kept))


def _is_passed(abandoned: CommitRecord, proven: Collection[CommitRecord]) -> bool:
    """Return True if training has reached that step again, by a later commit."""
    return any(record.slot > abandoned.slot and record.step >= abandoned.step for record in proven)


def _known(record: CommitRecord, times_unix_s: Mapping[int, float]) -> Committed:
    return Committed(
        sequence=record.slot,
        step=record.step,
        time_unix_s=times_unix_s.get(record.slot),
        metrics=metrics_of(record),
    )


def metrics_of(record: CommitRecord) -> dict[str, float]:
    """Convert the metrics of the step into numbers."""
    return {name: _number(text) for name, text in (record.metrics or {}).items()}


def _number(text: str) -> float:
    """Convert a metric. Text that is no number becomes NaN, which is worse than any number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
