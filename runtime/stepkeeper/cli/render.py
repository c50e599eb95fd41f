"""Make rows and JSON documents from the state of a log. Pure."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stepkeeper.errors import RestoreError
from stepkeeper.log import BeginEntry, CommitRecord, LogState, Owner
from stepkeeper.quantities import size_text
from stepkeeper.retention.deletable import metrics_of

__all__ = [
    "Row",
    "age_text",
    "attempt_text",
    "build_rows",
    "count_text",
    "metrics_text",
    "owner_document",
    "row_document",
    "select_commits",
    "table_row",
    "time_text",
    "writer_text",
]

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400
_MOST_METRICS: Final = 3
"""The number of metrics that a table has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table that `ls` prints."""

    sequence: int | None
    """Slot of the commit; None for another writer's step."""

    step: int
    claim: int | None
    """Slot of the claim; None for another writer's step."""

    state: str
    """latest, line, abandoned or quarantined; for another writer's step: legacy or incomplete."""

    size_bytes: int
    verified: bool
    folder: str
    owner: Owner | None = None
    host: str | None = None
    """Host of rank 0 when the root was claimed; None if the claim names none."""

    parent: int | None = None
    time_unix_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the training gave with the step."""


def build_rows(
    state: LogState,
    records: Iterable[CommitRecord],
    *,
    begins: Mapping[int, BeginEntry],
    times: Mapping[int, float],
) -> list[Row]:
    """Build the rows of some commits of `state`, newest first.

    Args:
        state: The state of the log.
        records: The commits.
        begins: The entries that made their claims, by slot.
        times: When slots were put, in seconds since 1970.

    """
    line = {record.slot for record in state.line}
    return [
        Row(
            sequence=record.slot,
            step=record.step,
            claim=record.claim,
            state=_state_of(state, record, line),
            size_bytes=record.size_bytes,
            verified=record.verified,
            folder=record.folder,
            owner=begins[record.claim].owner,
            host=begins[record.claim].host,
            parent=record.parent,
            time_unix_s=times.get(record.slot),
            metrics=metrics_of(record),
        )
        for record in sorted(records, key=lambda each: each.slot, reverse=True)
    ]


def select_commits(
    state: LogState, steps: Sequence[int], sequences: Sequence[int]
) -> tuple[CommitRecord, ...]:
    """Select the newest commit of each step on the line, and the commits of `sequences`.

    The latest commit is selected if neither is given.

    Raises:
        RestoreError: There is no such commit; the message lists the existing ones.

    """
    if not steps and not sequences:
        if state.latest is None:
            raise RestoreError(
                "this root has no latest commit" if state.commits else "nothing is committed here"
            )
        return (state.latest,)
    picked = [_of_step(state, step) for step in steps]
    for sequence in sequences:
        if sequence not in state.commits:
            raise RestoreError(f"no commit has sequence {sequence}; there are: {_listed(state)}")
        picked.append(state.commits[sequence])
    return tuple({record.slot: record for record in picked}.values())


def _of_step(state: LogState, step: int) -> CommitRecord:
    for record in state.line:
        if record.step == step:
            return record
    off_line = [str(record.slot) for record in state.commits.values() if record.step == step]
    if off_line:
        raise RestoreError(
            f"step {step} isn't on the latest line, but has --sequence {' or '.join(off_line)}"
        )
    raise RestoreError(f"no commit of step {step}; there are: {_listed(state)}")


def _listed(state: LogState) -> str:
    newest = list(state.commits.values())[-8:]
    more = ", …" if len(state.commits) > len(newest) else ""
    return ", ".join(f"step {r.step} (sequence {r.slot})" for r in reversed(newest)) + more or "none"


def _state_of(state: LogState, record: CommitRecord, line: set[int]) -> str:
    if record.slot == state.head:
        return "latest"
    if record.quarantined:
        return "quarantined"
    return "line" if record.slot in line else "abandoned"


def row_document(row: Row, uri: str) -> dict[str, Any]:
    """Convert a row to a JSON object; `uri` is the root's."""
    return {
        "sequence": row.sequence,
        "step": row.step,
        "state": row.state,
        "claim": row.claim,
        "owner": owner_document(row.owner),
        "host": row.host,
        "parent": row.parent,
        "size_bytes": row.size_bytes,
        "verified": row.verified,
        "time_unix_s": row.time_unix_s,
        # JSON has finite numbers only; other metrics become text.
        "metrics": {
            name: value if math.isfinite(value) else str(value) for name, value in row.metrics.items()
        },
        "commit_uri": f"{uri}/{row.folder}",
    }


def owner_document(owner: Owner | None) -> dict[str, Any] | None:
    """Convert an owner to a JSON object; None if a process without an operator saved it."""
    if owner is None:
        return None
    return {
        "name": owner.name,
        "uid": owner.uid,
        "jobset_number": owner.jobset_number,
        "restart_attempt": owner.restart_attempt,
    }


def table_row(row: Row, now_unix_s: float) -> tuple[str, ...]:
    """Format a row: sequence, step, state, claim, attempt, host, size, verified, age, metrics."""
    return (
        "-" if row.sequence is None else str(row.sequence),
        str(row.step),
        row.state,
        "-" if row.claim is None else str(row.claim),
        attempt_text(row.owner),
        row.host or "-",
        size_text(row.size_bytes),
        "yes" if row.verified else "-",
        "-" if row.time_unix_s is None else age_text(now_unix_s - row.time_unix_s),
        metrics_text(row.metrics, most=_MOST_METRICS),
    )


def metrics_text(metrics: Mapping[str, float], *, most: int | None = None) -> str:
    """Format metrics as name=number, at most `most` of them; "-" if there are none."""
    shown = [f"{name}={value:.6g}" for name, value in metrics.items()]
    return " ".join([*shown[:most], *(["…"] if shown[most:] and most is not None else [])]) or "-"


def time_text(time_unix_s: float) -> str:
    """Format a time as a date and time of UTC."""
    return time.strftime("%FT%TZ", time.gmtime(time_unix_s))


def count_text(number: int, name: str) -> str:
    """Format a number of things: "1 rank", "2 ranks"."""
    return f"{number} {name}" + ("" if number == 1 else "s")


def writer_text(document: Mapping[str, Any]) -> str:
    """Format who saved the commit of `row_document`: the job and its start, and the host."""
    owner = document["owner"]
    who = (
        "a process without an operator"
        if owner is None
        else f"{owner['name']}, start {owner['jobset_number']}.{owner['restart_attempt']}"
    )
    return who if document["host"] is None else f"{who}, on {document['host']}"


def attempt_text(owner: Owner | None) -> str:
    """Format the job's name and the number of its start."""
    return "-" if owner is None else f"{owner.name} {owner.jobset_number}.{owner.restart_attempt}"


def age_text(seconds: float) -> str:
    """Format a number of seconds with one unit.

    The result is never negative: the store's clock and this one needn't agree.
    """
    whole = max(int(seconds), 0)
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m"
    if whole < 2 * _DAY_S:
        return f"{whole // _HOUR_S}h"
    return f"{whole // _DAY_S}d"
