"""Define the command verify."""

from typing import Annotated, Any

import typer

from stepkeeper.cli.blocks import CommitFindings, verify_commit
from stepkeeper.cli.render import select_commits
from stepkeeper.cli.root import Root, Url, open_root
from stepkeeper.cli.terminal import AsJson, ExitCode, Sequences, print_message, progress_bar, show_document
from stepkeeper.log import CommitRecord
from stepkeeper.quantities import count_text, size_text

__all__ = ["verify", "verify_with_progress"]


def verify(
    context: typer.Context,
    url: Url,
    *,
    steps: Annotated[
        list[int] | None,
        typer.Argument(metavar="STEP", min=0, help="Steps to verify. Default: the latest commit."),
    ] = None,
    sequences: Sequences = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify all live commits, also on abandoned branches.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every block of commits and compare it with its checksum. Exit code 1 if one is bad."""
    if every and (steps or sequences):
        raise typer.BadParameter("--all and single commits exclude each other")
    with open_root(context, url) as root:
        state = root.open_log()
        records = state.live[::-1] if every else select_commits(state, steps or (), sequences or ())
        documents = [_verify_one(root, record, as_json=as_json) for record in records]
        if as_json:
            show_document(root.uri, {"commits": documents})
        elif not documents:
            print_message(f"{root.uri}: there are no commits to verify")
    if any(document["bad"] for document in documents):
        raise typer.Exit(ExitCode.FINDING)


def _verify_one(root: Root, record: CommitRecord, *, as_json: bool) -> dict[str, Any]:
    found = verify_with_progress(root, record)
    # A commit that a job deletes while it is read here isn't bad.
    deleted = bool(found.bad) and record.slot not in root.log.refresh().commits
    if not as_json:
        _show(record, found, deleted=deleted)
    return {
        "sequence": record.slot,
        "step": record.step,
        "commit_uri": f"{root.uri}/{record.folder}",
        "n_objects": found.n_objects,
        "size_bytes": found.size_bytes,
        "deleted_meanwhile": deleted,
        "bad": [] if deleted else [{"object": b.name, "block": b.block, "says": b.fault} for b in found.bad],
        "alien": list(found.unlisted),
    }


def verify_with_progress(root: Root, record: CommitRecord) -> CommitFindings:
    """Find bad objects and blocks of the commit, and show the progress. Raises StorageError."""
    with progress_bar(f"step {record.step}", record.size_bytes) as show:
        return verify_commit(
            root.store, record, patience=root.patience, on_bytes=lambda n_bytes: show(advance=n_bytes)
        )


def _show(record: CommitRecord, found: CommitFindings, *, deleted: bool) -> None:
    what = f"step {record.step} (sequence {record.slot})"
    if deleted:
        typer.echo(f"{what}: was deleted while it was read")
        return
    for bad in found.bad:
        block = "" if bad.block is None else f" block {bad.block}"
        typer.echo(f"{what}: BAD {record.folder}/{bad.name}{block}: {bad.fault}")
    for name in found.unlisted:
        typer.echo(f"{what}: {record.folder}/{name} isn't an object of this commit")
    if not found.bad:
        read = f"{count_text(found.n_objects, 'object')}, {size_text(found.size_bytes)}"
        typer.echo(f"{what}: {read}, every block is right")
