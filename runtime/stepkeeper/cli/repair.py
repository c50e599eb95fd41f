"""Define the command repair: claim a root whose log is damaged, keeping all complete saves. It only appends."""

import socket
from typing import Annotated, Any

import typer

from stepkeeper.cli.removal import REPAIR_PREFIX
from stepkeeper.cli.render import age_text
from stepkeeper.cli.root import Root, Url, open_root
from stepkeeper.cli.terminal import AsJson, ExitCode, print_message, show_document
from stepkeeper.errors import RefusedError
from stepkeeper.log import CommitRecord
from stepkeeper.quantities import count_text, size_text
from stepkeeper.repair.repairing import QUIET_S, LastWrite, Plan, carry_out, find_last_write, plan_repair

__all__ = ["repair"]


def repair(
    context: typer.Context,
    url: Url,
    *,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Repair. Without it, print what would be done, and do nothing."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="The job that saved here is over. If it isn't, this stops it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Repair a damaged log, keeping every complete save. Without --yes, only print the plan; exit code 1 if damaged."""
    with open_root(context, url) as root:
        plan = plan_repair(root.store, patience=root.patience)
        if not plan.is_needed:
            root.open_log()
            _show(root, plan, None, as_json=as_json)
            return
        writing = find_last_write(root.store, plan.slot, probe=yes, patience=root.patience)
        if yes:
            if not force:
                _check_job_over(root, writing)
            host = REPAIR_PREFIX + socket.gethostname()
            carry_out(root.store, root.log, plan, host, patience=root.patience)
            # Open it like a start does, from the store's present content.
            root.open_log()
        _show(root, plan, None if yes else writing, as_json=as_json)
    if not yes:
        raise typer.Exit(ExitCode.FINDING)


def _check_job_over(root: Root, writing: LastWrite) -> None:
    if not writing.is_recent:
        return
    raise RefusedError(
        f"a job may still be saving to {root.uri} ({_last_write(writing)}): repair takes the root from it, and it "
        f"would stop with exit code 77 at its next save. Nothing was repaired. Stop the job and wait {QUIET_S // 60} "
        "minutes; or, if it is over, pass --force"
    )


def _last_write(writing: LastWrite) -> str:
    if writing.age_s is None:
        return "the store doesn't report when it was last written"
    return f"{writing.path} was written {age_text(writing.age_s)} ago"


def _show(root: Root, plan: Plan, writing: LastWrite | None, *, as_json: bool) -> None:
    """Show what is damaged, and what would be done; if `writing` is None, what was done."""
    if as_json:
        show_document(root.uri, _document(plan, writing))
        return
    if not plan.is_needed:
        typer.echo(f"nothing that a start needs is damaged: {plan.tail + 1} entries, nothing to repair")
        return
    for fault in plan.faults.values():
        typer.echo(f"damaged   {fault}")
    for label, text in _lines(plan):
        typer.echo(f"{label:<10}{text}")
    done = "repaired" if writing is None else "would"
    gone = f"mark {_slots(plan.marked)} as lost, and " if plan.marked else ""
    typer.echo(
        f"{done:<10}{gone}append slot {plan.slot}, a claim of the root whose index replaces all before it"
    )
    if writing is not None:
        refusal = f" --force, since {_last_write(writing)}" if writing.is_recent else ""
        print_message(f"nothing was written; to repair, stop the job and pass --yes{refusal}")


def _lines(plan: Plan) -> list[tuple[str, str]]:
    """List for each commit what the repair does with it, with a label: those set aside stay, but count as bad."""
    rebuilt, state = plan.rebuilt, plan.rebuilt.state
    kept = [record for record in state.live if record not in rebuilt.found]
    lines = [("kept", f"{len(kept)} commits" + (f": {', '.join(map(_name, kept))}" if kept else ""))]
    lines += [
        ("found", f"{_name(record)}, whole by its manifests: it counts as a commit")
        for record in rebuilt.found
    ]
    lines += [("aside", _aside(state.commits[slot], why)) for slot, why in rebuilt.aside.items()]
    lines += [("deleted", f"{_name(record)}: no data of it is left") for record in rebuilt.deleted]
    if plan.unfinished:
        saves = count_text(plan.unfinished, "save")
        lines.append(
            ("lost", f"{saves} without rank 0's manifest: the next start deletes the remaining data")
        )
    latest = state.latest
    lines.append(("latest", "none" if latest is None else _name(latest)))
    return lines


def _name(record: CommitRecord) -> str:
    return f"step {record.step} (sequence {record.slot})"


def _aside(record: CommitRecord, why: str) -> str:
    size = size_text(record.size_bytes)
    return f"{_name(record)} in {record.folder}, {size}: {why}; quarantined, so that its data stays"


def _slots(slots: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, slots[:8]))
    return f"slots {shown}" + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


def _document(plan: Plan, writing: LastWrite | None) -> dict[str, Any]:
    rebuilt, state = plan.rebuilt, plan.rebuilt.state
    return {
        "needed": plan.is_needed,
        "repaired": plan.is_needed and writing is None,
        "damaged": [{"slot": slot, "fault": fault} for slot, fault in plan.faults.items()],
        "live": [_record_document(record) for record in state.live],
        "found": [_record_document(record) for record in rebuilt.found],
        "aside": [
            _record_document(state.commits[slot]) | {"fault": why} for slot, why in rebuilt.aside.items()
        ],
        "deleted": [_record_document(record) for record in rebuilt.deleted],
        "unfinished": plan.unfinished,
        "head": state.head,
        "slot": plan.slot if plan.is_needed else None,
        "job_may_be_saving": None if writing is None else writing.is_recent,
    }


def _record_document(record: CommitRecord) -> dict[str, Any]:
    return {"sequence": record.slot, "step": record.step, "folder": record.folder}
