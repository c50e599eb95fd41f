"""Define the commands rm and gc. Data is deleted only after the log names it as deleted; pinned data is kept."""

import socket
import time
from collections.abc import Collection
from typing import Annotated, Any

import typer

from stepkeeper.cli.history import read_slot_time
from stepkeeper.cli.removal import (
    HOST_PREFIX,
    check_job_over,
    check_removable,
    commit_to_verify,
    select_removed,
)
from stepkeeper.cli.render import age_text
from stepkeeper.cli.root import Root, Url, open_root
from stepkeeper.cli.terminal import AsJson, Sequences, print_message, show_document, show_table
from stepkeeper.cli.verify import verify_with_progress
from stepkeeper.errors import PinLostError, RefusedError
from stepkeeper.log import BeginEntry, CommitRecord, LogState
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.quantities import count_text, size_text
from stepkeeper.retention.garbage import Garbage, GcReport, sweep
from stepkeeper.retention.garbage import gc as collect
from stepkeeper.retention.leases import IsOver, PinReport, leases_by, report_pins
from stepkeeper.retention.pins import remove_pin

__all__ = ["gc", "rm"]


def rm(
    context: typer.Context,
    url: Url,
    *,
    steps: Annotated[list[int] | None, typer.Argument(metavar="STEP", min=0, help="Steps to remove.")] = None,
    sequences: Sequences = None,
    force: Annotated[
        bool, typer.Option("--force", help="The job that saved here is over. If it isn't, this stops it.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove. Without it, print what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove commits and their data. For roots whose job is over: this claims the root."""
    if not steps and not sequences:
        raise typer.BadParameter("name the commits to remove: steps, or --sequence")
    with open_root(context, url) as root:
        state = root.open_log()
        records = select_removed(state, steps or (), sequences or ())
        slots = {record.slot for record in records}
        check_removable(state, slots)
        _check_job_over(root, state, force=force)
        _check_confirmed(root, records, force=force, yes=yes)
        _check_proof(root, state, slots)
        deleted, pinned = _remove_commits(root, state.tail, slots)
        waiting = {each.slot for each in pinned}
        document = {
            "deleted": [{"sequence": r.slot, "step": r.step, "size_bytes": r.size_bytes} for r in deleted],
            "pinned": sorted(each.slot for each in pinned if each.slot is not None),
        }
        if as_json:
            show_document(root.uri, document)
            return
        for record in deleted:
            waits = "; pinned: gc deletes its data once its pins are gone" if record.slot in waiting else ""
            typer.echo(
                f"removed step {record.step} (sequence {record.slot}, {size_text(record.size_bytes)}){waits}"
            )


def gc(
    context: typer.Context,
    url: Url,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    pins: Annotated[
        bool, typer.Option("--pins", help="List the pins and who holds them; delete nothing.")
    ] = False,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="With --pins: remove the pin of this name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete data that no commit needs.

    Abandoned saves and interrupted deletions leave such data.
    """
    if pins and dry_run:
        raise typer.BadParameter("--pins and --dry-run exclude each other")
    if remove is not None and not pins:
        raise typer.BadParameter("--remove needs --pins, which lists the names")
    with open_root(context, url) as root:
        if remove is not None:
            _remove_pin(root, remove, as_json=as_json)
            return
        if pins:
            _show_pins(root, as_json=as_json)
            return
        root.open_log()
        report = collect(root.log, root.store, dry_run=dry_run, patience=root.patience)
        if as_json:
            show_document(root.uri, _report_document(report, dry_run=dry_run))
        else:
            _print_report(report, done="would collect" if dry_run else "collected")


def _check_job_over(root: Root, state: LogState, *, force: bool) -> None:
    assert state.claim is not None
    last = root.log.entry(state.claim).body
    assert isinstance(last, BeginEntry)
    written = read_slot_time(root, state.tail).get(state.tail)
    moment = f"slot {state.tail}" if written is None else f"{age_text(time.time() - written)} ago"
    check_job_over(state, last, moment, force=force)


def _check_confirmed(root: Root, records: Collection[CommitRecord], *, force: bool, yes: bool) -> None:
    if force:
        print_message(
            f"claiming {root.uri}: a job that still saves there stops with exit code 77 at its next save, and what it "
            "trained since its last commit is lost"
        )
    if not yes:
        listed = ", ".join(f"step {record.step} (sequence {record.slot})" for record in records)
        raise RefusedError(f"nothing was removed; to remove {listed} from {root.uri}, pass --yes")


def _check_proof(root: Root, state: LogState, slots: Collection[int]) -> None:
    latest = commit_to_verify(state, slots)
    if latest is None:
        return
    print_message(f"no commit on the latest line has been restored yet: verifying step {latest.step} first")
    found = verify_with_progress(root, latest)
    if found.bad:
        raise RefusedError(
            f"the latest commit, step {latest.step}, is bad ({found.bad[0].fault}): nothing older was removed"
        )


def _remove_commits(
    root: Root, tail: int, slots: Collection[int]
) -> tuple[tuple[CommitRecord, ...], tuple[Garbage, ...]]:
    """Delete the commits in the log, and then their data, except where it is pinned.

    Returns:
        The commits that were deleted, and those folders whose data is pinned.
    """
    state = root.log.refresh()
    if state.tail != tail:
        raise RefusedError(
            f"slot {state.tail} was written just now: a job is saving here. Nothing was removed; stop the job first"
        )
    # Claim for the present owner: the root keeps its name, and any later start of the job counts as newer.
    claim = root.log.begin(state.owner, host=HOST_PREFIX + socket.gethostname())

    def choose(state: LogState) -> list[int]:
        check_removable(state, slots)
        return sorted(slot for slot in slots if slot in state.commits)

    deleted = root.log.delete(claim, choose)
    garbage = [Garbage(folder=record.folder, slot=record.slot) for record in deleted]
    return deleted, sweep(root.store, garbage, is_over=_leases(root), patience=root.patience)


def _leases(root: Root) -> IsOver:
    return leases_by(StoreTimes(root.store, patience=root.patience), root.log.state.tail)


def _report_pins(root: Root) -> tuple[LogState, tuple[PinReport, ...]]:
    state = root.open_log()
    return state, report_pins(root.store, _leases(root), patience=root.patience)


def _show_pins(root: Root, *, as_json: bool) -> None:
    state, reports = _report_pins(root)
    if as_json:
        show_document(root.uri, {"pins": [_pin_document(state, each) for each in reports]})
    elif not reports:
        typer.echo("no pins: no data is protected from deletion")
    else:
        columns = ("NAME", "SEQUENCE", "STEP", "HOLDER", "HOST", "RENEWED", "LEASE", "REASON")
        rows = [_pin_row(state, each) for each in reports]
        show_table(columns, rows, right=("SEQUENCE", "STEP", "RENEWED"))


def _remove_pin(root: Root, wanted: str, *, as_json: bool) -> None:
    """Remove one pin by its name. Raises PinLostError that lists the names if there is none of that name."""
    state, reports = _report_pins(root)
    found = next((each for each in reports if each.name.text == wanted), None)
    if found is None:
        names = ", ".join(each.name.text for each in reports) or "none"
        raise PinLostError(f"{root.uri} has no pin {wanted!r}; its pins: {names}")
    remove_pin(root.store, found.name, patience=root.patience)
    if as_json:
        show_document(root.uri, {"removed": _pin_document(state, found)})
        return
    goes = "" if found.name.slot in state.commits else "; the next gc deletes its data"
    typer.echo(f"removed pin {wanted} of {_holder_text(found)}{goes}")


def _print_report(report: GcReport, *, done: str) -> None:
    """Print the collected folders and pins, one per line, and the sum."""
    for state, found in ((done, report.collected), ("pinned", report.pinned)):
        for each in found:
            objects, size = count_text(each.n_objects, "object"), size_text(each.size_bytes)
            typer.echo(f"{state} {each.folder}: {objects}, {size}")
    for path in report.over:
        typer.echo(f"{done} {path}: this pin was not renewed for a whole lease")
    for path in report.remnants:
        typer.echo(f"{done} {path}: left by a process that was killed")
    total_bytes = sum(each.size_bytes for each in report.collected)
    folders = count_text(len(report.collected), "folder")
    typer.echo(f"{done} {folders}, {size_text(total_bytes)}; {len(report.pinned)} pinned")


def _report_document(report: GcReport, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "collected": [_garbage_document(each) for each in report.collected],
        "pinned": [_garbage_document(each) for each in report.pinned],
        "pins_over": list(report.over),
        "remnants": list(report.remnants),
    }


def _holder_text(report: PinReport) -> str:
    return "an unreadable holder" if report.pin is None else report.pin.holder


def _pin_row(state: LogState, report: PinReport) -> tuple[str, ...]:
    name, pin = report.name, report.pin
    lease = "none" if name.seen is None else f"current, {state.tail - name.seen} entries behind"
    return (
        name.text,
        str(name.slot),
        str(state.commits[name.slot].step) if name.slot in state.commits else "deleted",
        _holder_text(report),
        (pin and pin.host) or "-",
        "-" if name.time_unix_s is None else age_text(time.time() - name.time_unix_s),
        "over" if report.is_over else lease,
        (pin and pin.reason) or "-",
    )


def _pin_document(state: LogState, report: PinReport) -> dict[str, Any]:
    name, pin = report.name, report.pin
    lease = "none" if name.seen is None else "over" if report.is_over else "current"
    return {
        "name": name.text,
        "sequence": name.slot,
        "step": state.commits[name.slot].step if name.slot in state.commits else None,
        "holder": pin and pin.holder,
        "host": pin and pin.host,
        "renewed_unix_s": name.time_unix_s,
        "seen": name.seen,
        "lease": lease,
        "reason": pin and pin.reason,
        "nonce": name.nonce,
    }


def _garbage_document(garbage: Garbage) -> dict[str, Any]:
    return {
        "folder": garbage.folder,
        "sequence": garbage.slot,
        "n_objects": garbage.n_objects,
        "size_bytes": garbage.size_bytes,
    }
