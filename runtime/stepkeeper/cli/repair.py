"""Define the command repair: rebuild what can be proven of a damaged log. It appends, and changes nothing."""

import socket
from typing import Annotated, Any

import typer

from stepkeeper.cli.removal import REPAIR_PREFIX
from stepkeeper.cli.render import age_text
from stepkeeper.cli.root import Root, Url, open_root
from stepkeeper.cli.terminal import AsJson, ExitCode, print_message, show_document
from stepkeeper.errors import RefusedError
from stepkeeper.log import CommitRecord
from stepkeeper.quantities import size_text
from stepkeeper.repair.repairing import QUIET_S, Plan, Writing, carry_out, find_writing, plan_repair

__all__ = ["repair"]


def repair(
    context: typer.Context,
    url: Url,
    *,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Repair. Without it, print what would be done, and do nothing."),
    ] = False,
    adopt: Annotated[
        str | None,
        typer.Option(
            "--adopt",
            metavar="FOLDER",
            help="Make this save, which no entry proves to have been committed, the latest commit.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="The job that saved here is over. If it isn't, this stops it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild what can be proven of a damaged log. Without --yes, only print it; exit code 1 if there is damage."""
    with open_root(context, url) as root:
        plan = plan_repair(root.store, adopt=adopt, patience=root.patience)
        if not plan.is_needed:
            root.open_log()
            _show(root, plan, None, as_json=as_json)
            return
        writing = find_writing(root.store, plan.slot, probe=yes, patience=root.patience)
        if yes:
            if not force:
                _check_job_over(root, writing)
            host = REPAIR_PREFIX + socket.gethostname()
            carry_out(root.store, root.log, plan, host, patience=root.patience)
            # As a start opens it: from what is in the store now.
            root.open_log()
        _show(root, plan, None if yes else writing, as_json=as_json)
    if not yes:
        raise typer.Exit(ExitCode.FINDING)


def _check_job_over(root: Root, writing: Writing) -> None:
    if not writing.is_recent:
        return
    raise RefusedError(
        f"a job may be saving to {root.uri} still ({_last_write(writing)}): repairing takes the root from it, and it "
        f"would stop with exit code 77 at its next save. Stop it, and wait {QUIET_S // 60} minutes; or, where it is "
        "over, say --force. Nothing was repaired"
    )


def _last_write(writing: Writing) -> str:
    if writing.age_s is None:
        return "the store doesn't tell when it was written to"
    return f"{writing.path} was written {age_text(writing.age_s)} ago"


def _show(root: Root, plan: Plan, writing: Writing | None, *, as_json: bool) -> None:
    """Show what is damaged, and what would be done; if `writing` is None, what was done."""
    if as_json:
        show_document(root.uri, _document(plan, writing))
        return
    for fault in plan.log.faults.values():
        typer.echo(f"damaged   {fault}")
    if not plan.is_needed:
        says = "nothing that a start needs is damaged" if plan.log.faults else "nothing is damaged"
        typer.echo(f"{says}: {len(plan.log.entries)} entries, nothing to repair")
        return
    for label, text in _lines(plan):
        typer.echo(f"{label:<10}{text}")
    done = "repaired" if writing is None else "would"
    gone = f"mark {_slots(plan.marked)} as lost, and " if plan.marked else ""
    typer.echo(
        f"{done:<10}{gone}append slot {plan.slot}, a claim of the root whose index stands for all before it"
    )
    if writing is not None:
        refusal = f" --force, since {_last_write(writing)}" if writing.is_recent else ""
        print_message(f"nothing was written; to repair, stop the job and say --yes{refusal}")


def _lines(plan: Plan) -> list[tuple[str, str]]:
    rebuilt, state = plan.rebuilt, plan.rebuilt.state
    special = {record.slot for record in (*rebuilt.proven, *rebuilt.unproven, rebuilt.adopted) if record}
    kept = [record for record in state.live if record.slot not in special]
    lines = [("kept", f"{len(kept)} commits" + (f": {', '.join(map(_name, kept))}" if kept else ""))]
    lines += [("proven", f"{_name(record)} by its manifests and later entries") for record in rebuilt.proven]
    if rebuilt.adopted is not None:
        lines.append(("adopted", f"{_name(rebuilt.adopted)}, which nothing proves to have been committed"))
    lines += [("unproven", _unproven(record)) for record in rebuilt.unproven]
    lines += [("deleted", f"{_name(record)}: no data of it is left") for record in rebuilt.deleted]
    lines += [("unknown", doubt) for doubt in rebuilt.doubts]
    latest = state.latest
    lines.append(("latest", "none" if latest is None else _name(latest)))
    return lines


def _name(record: CommitRecord) -> str:
    return f"step {record.step} (sequence {record.slot})"


def _unproven(record: CommitRecord) -> str:
    return (
        f"{_name(record)} in {record.folder}, {size_text(record.size_bytes)}: kept as quarantined. If you know that it "
        f"is the latest, --adopt {record.folder}"
    )


def _slots(slots: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, slots[:8]))
    return f"slots {shown}" + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


def _document(plan: Plan, writing: Writing | None) -> dict[str, Any]:
    rebuilt, state = plan.rebuilt, plan.rebuilt.state
    return {
        "needed": plan.is_needed,
        "repaired": plan.is_needed and writing is None,
        "damaged": [{"slot": slot, "fault": fault} for slot, fault in plan.log.faults.items()],
        "live": [_record_document(record) for record in state.live],
        "proven": [_record_document(record) for record in rebuilt.proven],
        "unproven": [_record_document(record) for record in rebuilt.unproven],
        "deleted": [_record_document(record) for record in rebuilt.deleted],
        "adopted": None if rebuilt.adopted is None else _record_document(rebuilt.adopted),
        "doubts": list(rebuilt.doubts),
        "head": state.head,
        "slot": plan.slot if plan.is_needed else None,
        "job_may_be_saving": None if writing is None else writing.is_recent,
    }


def _record_document(record: CommitRecord) -> dict[str, Any]:
    return {"sequence": record.slot, "step": record.step, "folder": record.folder}
