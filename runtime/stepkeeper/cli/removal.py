"""Decide which commits a person may remove with `stepkeeper rm`, and when. Pure."""

from collections.abc import Collection, Sequence
from typing import Final

from stepkeeper.errors import RefusedError, RestoreError
from stepkeeper.log import BeginEntry, CommitRecord, LogState

__all__ = [
    "HOST_PREFIX",
    "REPAIR_PREFIX",
    "check_job_over",
    "check_removable",
    "commit_to_verify",
    "select_removed",
]

HOST_PREFIX: Final = "stepkeeper rm on "
"""Start of the host name in a claim that this command makes. Such a claim ends with its command."""

REPAIR_PREFIX: Final = "stepkeeper repair on "
"""The same in a claim of the command repair."""


def select_removed(
    state: LogState, steps: Sequence[int], sequences: Sequence[int]
) -> tuple[CommitRecord, ...]:
    """Select the commits of these steps and sequences, also abandoned and quarantined ones.

    Raises RestoreError if there is none, RefusedError if a step names several.
    """
    picked: dict[int, CommitRecord] = {}
    for step in steps:
        named = [record for record in state.commits.values() if record.step == step]
        if not named:
            raise RestoreError(f"there is no commit of step {step}")
        if len(named) > 1:
            listed = ", ".join(str(record.slot) for record in named)
            raise RefusedError(f"step {step} was saved more than once: select one with --sequence: {listed}")
        picked[named[0].slot] = named[0]
    for sequence in sequences:
        if sequence not in state.commits:
            raise RestoreError(f"no commit has sequence {sequence}")
        picked[sequence] = state.commits[sequence]
    return tuple(picked.values())


def check_removable(state: LogState, slots: Collection[int]) -> None:
    """Check that the line keeps what a restore needs without `slots`. Raises RefusedError."""
    if state.head in slots:
        raise RefusedError(
            f"sequence {state.head} is the latest commit: without it, the next start would silently lose steps. To "
            "go back to an older commit, start from that one; this one is then abandoned, and can be removed"
        )
    verified = _verified_of_line(state)
    if verified and verified[0].slot in slots:
        raise RefusedError(
            f"sequence {verified[0].slot} (step {verified[0].step}) is the newest commit on the latest line that was "
            "ever fully restored: it is the fallback if a newer one turns out bad. It can be removed once a newer "
            "one was restored"
        )


def commit_to_verify(state: LogState, slots: Collection[int]) -> CommitRecord | None:
    """Return the commit to verify before `slots` are removed: the latest, if the line has none verified."""
    of_line = any(record.slot in slots for record in state.line)
    return state.latest if of_line and not _verified_of_line(state) else None


def check_job_over(state: LogState, last: BeginEntry, last_write: str, *, force: bool) -> None:
    """Check that no process can be writing under the `last` claim, or that the user says so by `force`.

    `last_write` is a text for people.
    """
    if force or last.host.startswith((HOST_PREFIX, REPAIR_PREFIX)):
        return
    who = state.owner.name if state.owner else f"a process on {last.host or 'an unknown host'}"
    raise RefusedError(
        f"claim {state.claim} of {who} may still be writing (its last entry: {last_write}); rm takes the root from "
        "it, and it would stop with exit code 77 at its next save. If that job is over, pass --force; otherwise let "
        "retention delete, or stop the job first"
    )


def _verified_of_line(state: LogState) -> list[CommitRecord]:
    return [record for record in state.line if record.verified]
