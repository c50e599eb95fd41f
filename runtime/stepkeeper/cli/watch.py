"""Define the command watch."""

import time
from typing import Annotated

import typer

from stepkeeper.cli.history import read_begins, read_slot_time
from stepkeeper.cli.render import attempt_text, build_rows, metrics_text, row_document, time_text
from stepkeeper.cli.root import Root, Url, open_root
from stepkeeper.cli.terminal import AsJson, show_document
from stepkeeper.log import CommitRecord, LogState
from stepkeeper.quantities import size_text

__all__ = ["watch"]


def watch(
    context: typer.Context,
    url: Url,
    *,
    interval_s: Annotated[
        float,
        typer.Option("--interval", min=0.0, metavar="SECONDS", help="Seconds between two looks at the log."),
    ] = 5.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after this number of commits.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the latest commit, then new ones, until Ctrl-C."""
    try:
        with open_root(context, url) as root:
            _watch(root, interval_s, count, as_json=as_json)
    except KeyboardInterrupt:
        return


def _watch(root: Root, interval_s: float, count: int | None, *, as_json: bool) -> None:
    state = root.open_log(may_come=True)
    seen = state.tail if state.head is None else state.head - 1
    n_left = count
    while True:
        new = [record for record in state.commits.values() if record.slot > seen][:n_left]
        for record in new:
            _announce(root, state, record, as_json=as_json)
        seen = max(seen, state.tail)
        if n_left is not None:
            n_left -= len(new)
            if n_left == 0:
                return
        time.sleep(interval_s)
        state = root.log.refresh()


def _announce(root: Root, state: LogState, record: CommitRecord, *, as_json: bool) -> None:
    rows = build_rows(
        state, claims=read_begins(root, {record.claim}), times=read_slot_time(root, record.slot), every=True
    )
    (row,) = (row for row in rows if row.sequence == record.slot)
    if as_json:
        show_document(root.uri, row_document(row, root.uri), line=True)
        return
    moment = "" if row.time_unix_s is None else f"{time_text(row.time_unix_s)} "
    typer.echo(
        f"{moment}step {row.step} (sequence {row.sequence}, claim {row.claim}, {attempt_text(row.owner)}): "
        f"{size_text(row.size_bytes)}, {row.state}"
        + (f", {metrics_text(row.metrics)}" if row.metrics else "")
    )
