"""Define the commands ls, show and path. They only read: a job that is saving doesn't notice them."""

import time
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors, merge_values
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.checkpoint.reading import read_manifests
from stepkeeper.cli.history import read_begins, read_slot_times
from stepkeeper.cli.render import (
    age_text,
    attempt_text,
    commit_documents,
    foreign_document,
    metrics_text,
    owner_document,
    select_commits,
    table_row,
    time_text,
    writer_text,
)
from stepkeeper.cli.root import Root, Url, open_root
from stepkeeper.cli.terminal import AsJson, print_message, show_document, show_table
from stepkeeper.log import CommitRecord, LogState
from stepkeeper.log.foreign_steps import find_steps, find_steps_below
from stepkeeper.quantities import count_text, size_text

__all__ = ["OneSequence", "ls", "path", "select_commit", "show"]

_COLUMNS = ("SEQUENCE", "STEP", "STATE", "CLAIM", "ATTEMPT", "HOST", "SIZE", "VERIFIED", "AGE", "METRICS")
_OPTIONAL = ("HOST", "METRICS")
_NUMBERS = ("SEQUENCE", "STEP", "CLAIM", "SIZE", "AGE")

Step = Annotated[
    int | None, typer.Argument(metavar="STEP", help="The step. Default: the latest commit.", min=0)
]
OneSequence = Annotated[
    int | None, typer.Option("--sequence", min=0, help="Select the commit with this sequence, on any branch.")
]


def ls(
    context: typer.Context,
    url: Url,
    *,
    every: Annotated[
        bool, typer.Option("--all", help="Also list abandoned branches and quarantined commits.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the commits of the latest line, newest first.

    The steps of another writer that it continues from follow.
    """
    with open_root(context, url) as root:
        state = root.open_log()
        shown = [*state.commits.values()] if every else state.line
        begins = read_begins(root, {record.claim for record in shown})
        times = read_slot_times(root) if shown else {}
        commits = commit_documents(state, shown, begins=begins, times=times, uri=root.uri)
        foreign = find_steps_below(state, lambda: find_steps(root.store, patience=root.patience))
        commits += [foreign_document(each, root.uri) for each in foreign]
        if as_json:
            show_document(root.uri, _state_document(state) | {"commits": commits})
            return
        if state.tail < 0 and not commits:
            print_message(f"{root.uri}: nothing has been saved here yet")
        elif not commits:
            print_message(
                f"{root.uri}: no commit on the latest line" + ("" if every else "; --all shows the rest")
            )
        now_unix_s = time.time()
        rows = [table_row(each, now_unix_s) for each in commits]
        show_table(_COLUMNS, rows, right=_NUMBERS, optional=_OPTIONAL)


def show(
    context: typer.Context,
    url: Url,
    *,
    step: Step = None,
    sequence: OneSequence = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list the tensors and values.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one commit: who saved it, and what it holds."""
    with open_root(context, url) as root:
        state = root.open_log()
        record = select_commit(state, step, sequence)
        with root.reading(record):
            manifests = read_manifests(root.store, record, patience=root.patience)
        document = _commit_document(root, state, record, manifests, listed=tensors)
    if as_json:
        show_document(root.uri, document)
    else:
        _show(document, record)


def path(
    context: typer.Context,
    url: Url,
    *,
    step: Step = None,
    sequence: OneSequence = None,
    as_json: AsJson = False,
) -> None:
    """Print the folder of a commit, which stock DCP loads.

    Stock DCP is torch.distributed.checkpoint.
    """
    with open_root(context, url) as root:
        record = select_commit(root.open_log(), step, sequence)
        uri = f"{root.uri}/{record.folder}"
        place = unquote(urlsplit(uri).path) if uri.startswith("file:") else uri
        if as_json:
            document = {"sequence": record.slot, "step": record.step, "path": place, "commit_uri": uri}
            show_document(root.uri, document)
        else:
            typer.echo(place)


def _state_document(state: LogState) -> dict[str, Any]:
    return {
        "root": state.root,
        "tail": state.tail,
        "head": state.head,
        "claim": state.claim,
        "owner": owner_document(state.owner),
    }


def select_commit(state: LogState, step: int | None, sequence: int | None) -> CommitRecord:
    """Return the requested commit, or the latest one. Raises RestoreError that lists the existing ones."""
    if step is not None and sequence is not None:
        raise typer.BadParameter("give a step or a sequence, not both")
    steps = () if step is None else (step,)
    return select_commits(state, steps, () if sequence is None else (sequence,))[0]


def _commit_document(
    root: Root, state: LogState, record: CommitRecord, manifests: Sequence[Manifest], *, listed: bool
) -> dict[str, Any]:
    begins, times = read_begins(root, {record.claim}), read_slot_times(root)
    (document,) = commit_documents(state, [record], begins=begins, times=times, uri=root.uri)
    tensors, values = merge_tensors(manifests), merge_values(manifests)
    ref = record.manifest
    document |= {
        "attempt": attempt_text(document["owner"]),
        "world_size": manifests[0].world_size,
        "n_objects": 1 + sum(len(manifest.objects) for manifest in manifests),
        "n_tensors": len(tensors),
        "n_values": len(values),
        "manifest": {"path": ref.path, "size_bytes": ref.size_bytes, "crc32c": ref.crc32c},
    }
    if listed:
        document["tensors"] = [
            {
                "name": name,
                "dtype": tensor.dtype,
                "shape": list(tensor.global_shape),
                "n_chunks": len(tensor.chunks),
            }
            for name, tensor in tensors.items()
        ]
        document["values"] = [
            {"name": name, "size_bytes": value.length_bytes} for name, value in values.items()
        ]
    return document


def _time_and_age(time_unix_s: float | None) -> str:
    if time_unix_s is None:
        return "the store doesn't report when"
    return f"{time_text(time_unix_s)} ({age_text(time.time() - time_unix_s)} ago)"


def _show(document: dict[str, Any], record: CommitRecord) -> None:
    manifest = document["manifest"]
    lines = {
        "step": document["step"],
        "sequence": document["sequence"],
        "state": document["state"] + (", verified by a restore" if document["verified"] else ""),
        "saved": _time_and_age(document["time_unix_s"]),
        "metrics": metrics_text(document["metrics"]),
        "saved by": f"{writer_text(document)}, claim {document['claim']}",
        "parent": "-" if document["parent"] is None else document["parent"],
        "size": f"{size_text(record.size_bytes)} ({record.size_bytes} bytes)",
        "content": f"{count_text(document['n_tensors'], 'tensor')}, {count_text(document['n_values'], 'value')}",
        "stored": f"by {count_text(document['world_size'], 'rank')}, in {count_text(document['n_objects'], 'object')}",
        "manifest": f"{manifest['path']}, {manifest['size_bytes']} bytes, crc32c {manifest['crc32c']:08x}",
        "folder": document["commit_uri"],
    }
    for key, value in lines.items():
        typer.echo(f"{key + ':':<12}{value}")
    rows = [(t["name"], t["dtype"], str(t["shape"])) for t in document.get("tensors", ())]
    rows += [(v["name"], "value", size_text(v["size_bytes"])) for v in document.get("values", ())]
    show_table(("NAME", "TYPE", "SHAPE"), rows)
