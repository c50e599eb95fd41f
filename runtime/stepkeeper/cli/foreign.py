"""Show the checkpoints that another writer left in a root."""

from typing import Any

import typer

from stepkeeper.cli.render import Row, count_text
from stepkeeper.cli.root import Root
from stepkeeper.log import LogState
from stepkeeper.log.foreign_steps import ForeignStep, find_steps, find_steps_below
from stepkeeper.quantities import size_text

__all__ = ["legacy_document", "legacy_rows", "legacy_step", "show_legacy"]


def legacy_rows(root: Root, state: LogState) -> list[Row]:
    """Build the rows of the steps that the latest line goes on from, newest first."""
    return [_row(each) for each in _found(root, state)]


def legacy_step(root: Root, state: LogState, step: int | None, sequence: int | None) -> ForeignStep | None:
    """Find another writer's finished step.

    That is the step asked for, unless it is a step of the line; or the newest, if none is asked for and nothing is
    committed.
    A step is finished if it has the `.metadata` that its writer puts last.
    """
    if sequence is not None or any(record.step == step for record in state.line):
        return None
    if step is None and state.commits:
        return None
    found = (each for each in _found(root, state) if each.is_finished)
    return next((each for each in found if step in (None, each.step)), None)


def legacy_document(root: Root, legacy: ForeignStep) -> dict[str, Any]:
    """Convert another writer's step to a JSON object."""
    return {
        "sequence": None,
        "step": legacy.step,
        "state": "legacy",
        "writer": legacy.writer,
        "size_bytes": legacy.size_bytes,
        "n_objects": len(legacy.objects),
        "commit_uri": f"{root.uri}/{legacy.folder}",
    }


def show_legacy(document: dict[str, Any]) -> None:
    """Print what is known of another writer's step."""
    size_bytes = document["size_bytes"]
    lines = {
        "step": document["step"],
        "state": f"legacy: saved by {document['writer']}, not in the log and without checksums",
        "size": f"{size_text(size_bytes)} ({size_bytes} bytes), in {count_text(document['n_objects'], 'object')}",
        "folder": document["commit_uri"],
    }
    for key, value in lines.items():
        typer.echo(f"{key + ':':<12}{value}")


def _found(root: Root, state: LogState) -> tuple[ForeignStep, ...]:
    return find_steps_below(state, lambda: find_steps(root.store, patience=root.patience))


def _row(legacy: ForeignStep) -> Row:
    return Row(
        sequence=None,
        step=legacy.step,
        claim=None,
        state="legacy" if legacy.is_finished else "incomplete",
        size_bytes=legacy.size_bytes,
        verified=False,
        folder=legacy.folder,
    )
