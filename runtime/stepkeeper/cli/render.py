"""Describe the commits of a log as JSON objects, and format these as text. Pure."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from stepkeeper.errors import RestoreError
from stepkeeper.log import BeginEntry, CommitRecord, LogState, Owner
from stepkeeper.log.foreign_steps import ForeignStep
from stepkeeper.quantities import size_text
from stepkeeper.retention.deletable import metrics_of

__all__ = [
    "age_text",
    "attempt_text",
    "commit_documents",
    "foreign_document",
    "metrics_text",
    "owner_document",
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


def commit_documents(
    state: LogState,
    records: Iterable[CommitRecord],
    *,
    begins: Mapping[int, BeginEntry],
    times: Mapping[int, float],
    uri: str,
) -> list[dict[str, Any]]:
    """Describe commits of the root at `uri` as JSON objects, newest first.

    `begins` has the entries that made their claims, and `times` when slots were put, in seconds since 1970.
    """
    line = {record.slot for record in state.line}
    return [
        {
            "sequence": record.slot,
            "step": record.step,
            "state": _state_of(state, record, line),
            "claim": record.claim,
            "owner": owner_document(begins[record.claim].owner),
            "host": begins[record.claim].host,
            "parent": record.parent,
            "size_bytes": record.size_bytes,
            "verified": record.verified,
            "time_unix_s": times.get(record.slot),
            # JSON has finite numbers only; other metrics become text.
            "metrics": {
                name: value if math.isfinite(value) else str(value)
                for name, value in metrics_of(record).items()
            },
            "commit_uri": f"{uri}/{record.folder}",
        }
        for record in sorted(records, key=lambda each: each.slot, reverse=True)
    ]


def foreign_document(foreign: ForeignStep, uri: str) -> dict[str, Any]:
    """Describe another writer's step in the root at `uri`, with the keys of a commit."""
    return {
        "sequence": None,
        "step": foreign.step,
        "state": "legacy" if foreign.is_finished else "incomplete",
        "claim": None,
        "owner": None,
        "host": None,
        "parent": None,
        "size_bytes": foreign.size_bytes,
        "verified": False,
        "time_unix_s": None,
        "metrics": {},
        "commit_uri": f"{uri}/{foreign.folder}",
    }


def select_commits(
    state: LogState, steps: Sequence[int], sequences: Sequence[int]
) -> tuple[CommitRecord, ...]:
    """Select the newest commit of each step on the line, and those of `sequences`; without both, the latest.

    Raises RestoreError, which lists the existing ones.
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


def table_row(document: Mapping[str, Any], now_unix_s: float) -> tuple[str, ...]:
    """Format a row: sequence, step, state, claim, attempt, host, size, verified, age, metrics."""
    sequence, claim, time_unix_s = document["sequence"], document["claim"], document["time_unix_s"]
    return (
        "-" if sequence is None else str(sequence),
        str(document["step"]),
        document["state"],
        "-" if claim is None else str(claim),
        attempt_text(document["owner"]),
        document["host"] or "-",
        size_text(document["size_bytes"]),
        "yes" if document["verified"] else "-",
        "-" if time_unix_s is None else age_text(now_unix_s - time_unix_s),
        metrics_text(document["metrics"], most=_MOST_METRICS),
    )


def metrics_text(metrics: Mapping[str, float | str], *, most: int | None = None) -> str:
    """Format metrics as name=number, at most `most` of them; "-" if there are none."""
    shown = [f"{name}={float(value):.6g}" for name, value in metrics.items()]
    more = ["…"] if most is not None and len(shown) > most else []
    return " ".join([*shown[:most], *more]) or "-"


def time_text(time_unix_s: float) -> str:
    """Format a time as a date and time of UTC."""
    return time.strftime("%FT%TZ", time.gmtime(time_unix_s))


def writer_text(document: Mapping[str, Any]) -> str:
    """Format who saved a commit: the job and its start, and the host."""
    owner = document["owner"]
    who = (
        "a process without an operator"
        if owner is None
        else f"{owner['name']}, start {owner['jobset_number']}.{owner['restart_attempt']}"
    )
    return who if document["host"] is None else f"{who}, on {document['host']}"


def attempt_text(owner: Mapping[str, Any] | None) -> str:
    """Format the job's name and the number of its start; "-" for a process without an operator."""
    if owner is None:
        return "-"
    return f"{owner['name']} {owner['jobset_number']}.{owner['restart_attempt']}"


def age_text(seconds: float) -> str:
    """Format a number of seconds, at least 0, with one unit. Clocks needn't agree."""
    whole = max(int(seconds), 0)
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m"
    if whole < 2 * _DAY_S:
        return f"{whole // _HOUR_S}h"
    return f"{whole // _DAY_S}d"
