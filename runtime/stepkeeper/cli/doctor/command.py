"""Define the command doctor: check whether a root can be trusted, and recommend what to do if it can't."""

from typing import Annotated
from urllib.parse import urlsplit

import typer

from stepkeeper.cli.doctor.bucket import Finding, judge_bucket
from stepkeeper.cli.doctor.probing import probe_store
from stepkeeper.cli.root import Root, Url, open_root
from stepkeeper.cli.terminal import AsJson, ExitCode, show_document
from stepkeeper.errors import (
    DamagedEntryError,
    LogFormatError,
    LogGapError,
    MissingObjectError,
    PinFormatError,
    StorageError,
)
from stepkeeper.log.tail import LOG_PREFIX, slot_path
from stepkeeper.retention.pins import list_pins
from stepkeeper.storage import Store

__all__ = ["doctor"]


def doctor(
    context: typer.Context,
    url: Url,
    *,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Leave out the checks that write probe objects.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether a root can be trusted, and recommend what to do.

    It checks the log, the bucket's settings, permissions and conditional writes. Exit code 1 if something is bad.
    """
    with open_root(context, url) as root:
        findings = _log_findings(root)
        findings += _pin_findings(root)
        findings += _latest_findings(root)
        findings += _bucket_findings(root.store)
        if not read_only:
            findings += probe_store(root.store, root.patience)
        if as_json:
            documents = [
                {"check": f.check, "verdict": f.verdict, "says": f.summary, "todo": f.todo} for f in findings
            ]
            show_document(root.uri, {"findings": documents})
        else:
            _show(findings)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(ExitCode.FINDING)


def _show(findings: list[Finding]) -> None:
    for finding in findings:
        typer.echo(f"{finding.verdict.upper():<8}{finding.check}: {finding.summary}")
        if finding.todo:
            typer.echo(f"{'':<8}-> {finding.todo}")


def _log_findings(root: Root) -> list[Finding]:
    """Check that no slot of the log is missing or of an unknown format. Raises StorageError."""
    listed = root.patience.retry(lambda: root.store.list(LOG_PREFIX))
    paths = {stat.path for stat in listed}
    try:
        state = root.open_log()
        unlisted = [slot for slot in range(state.tail + 1) if slot_path(slot) not in paths]
        if unlisted:
            # A slot that was put after the listing isn't in it, but can be read.
            root.log.entry(unlisted[0])
    except (LogGapError, MissingObjectError, DamagedEntryError) as error:
        todo = (
            "restore it from object versions, soft delete or a copy, and find the rule or job that deletes there; "
            f"without a copy, see what can be rebuilt: stepkeeper repair {root.uri}"
        )
        return [Finding(check="log", verdict="bad", summary=str(error), todo=todo)]
    except LogFormatError as error:
        todo = "use the newest release; if it reports the same, something else changed the object"
        return [Finding(check="log", verdict="bad", summary=str(error), todo=todo)]
    if state.tail < 0:
        return [Finding(check="log", verdict="ok", summary="empty: nothing has been saved here yet")]
    owner = state.owner.name if state.owner else "a process started by hand"
    summary = f"{state.tail + 1} entries without a gap; last claim: slot {state.claim}, {owner}"
    return [Finding(check="log", verdict="ok", summary=summary)]


def _pin_findings(root: Root) -> list[Finding]:
    try:
        pins = list_pins(root.store, patience=root.patience)
    except PinFormatError as error:
        todo = (
            "find out who put it there; it keeps its commit's data until gc --pins --remove NAME removes it"
        )
        return [Finding(check="pins", verdict="warn", summary=str(error), todo=todo)]
    stale = [pin for pin in pins if pin.slot not in root.log.state.commits]
    if stale:
        summary = f"{len(stale)} of {len(pins)} pins keep data of commits that were deleted"
        todo = (
            "gc --pins lists their holders; gc --pins --remove NAME removes the pin of a holder that is gone"
        )
        return [Finding(check="pins", verdict="warn", summary=summary, todo=todo)]
    return [Finding(check="pins", verdict="ok", summary=f"{len(pins)}")]


def _latest_findings(root: Root) -> list[Finding]:
    state = root.log.state
    latest = state.latest
    if latest is None:
        if not state.commits:
            return []
        summary = f"none, though there are {len(state.commits)} commits"
        todo = "ls --all shows them; a start resumes from none of them unless one is chosen explicitly"
        return [Finding(check="latest", verdict="warn", summary=summary, todo=todo)]
    listed = root.patience.retry(lambda: root.store.list(f"{latest.folder}/"))
    size_bytes = sum(stat.size_bytes for stat in listed)
    what = f"step {latest.step} (sequence {latest.slot})"
    if size_bytes < latest.size_bytes:
        if latest.slot not in root.log.refresh().commits:
            return [Finding(check="latest", verdict="ok", summary=f"{what} was replaced during this check")]
        summary = f"{what} has {size_bytes} bytes of {latest.size_bytes}"
        todo = f"stepkeeper verify {root.uri} names the objects; a start falls back to the previous commit"
        return [Finding(check="latest", verdict="bad", summary=summary, todo=todo)]
    summary = f"{what}: all {latest.size_bytes} bytes are there; their checksums are not verified here"
    todo = f"stepkeeper verify {root.uri} reads every block and compares it with its checksum"
    return [Finding(check="latest", verdict="ok", summary=summary, todo=todo)]


def _bucket_findings(store: Store) -> list[Finding]:
    if urlsplit(store.uri).scheme != "gs":
        return []
    from stepkeeper.storage.gcs import GcsStore

    assert isinstance(store, GcsStore)
    try:
        settings = store.bucket_settings()
    except StorageError as error:
        summary = f"can't be read ({' '.join(str(error).split())})"
        todo = (
            "check lifecycle rules, soft delete and retention policy yourself, or grant storage.buckets.get"
        )
        return [Finding(check="bucket", verdict="unknown", summary=summary, todo=todo)]
    return judge_bucket(settings, urlsplit(store.uri).path.strip("/"))
