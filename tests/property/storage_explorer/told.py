"""Check what processes were told against what is in the root."""

from collections.abc import Mapping, Sequence
from typing import Any

from storage_explorer.oracle import Reading, ViolationError, check_data, check_forgetful

from stepkeeper.log.tail import slot_of
from stepkeeper.retention.leases import LEASE_ENTRIES

__all__ = ["check_told"]


def check_told(reading: Reading, objects: Mapping[str, bytes], notes: Sequence[tuple[Any, ...]]) -> None:
    """Check that what a process was told is so, and that what it holds is there, whether it lives or not."""
    held: tuple[str, int] | None = None
    for note in notes:
        match note:
            case ("committed", folder, slot) if reading.commits.get(folder) != slot:
                raise ViolationError(f"{folder} was said to be committed at slot {slot}, and isn't")
            case ("refused" | "voided", folder) if folder in reading.commits:
                raise ViolationError(f"{folder} was {note[0]}, and is committed")
            case ("followed", before, after) if any(before < begin < after for begin in reading.begins):
                raise ViolationError(f"claim {before} was followed by {after}, though another was between")
            case ("forgot", claim):
                check_forgetful(reading, claim, {each[1].slot for each in notes if each[0] == "claimed"})
            case ("repaired", slot) if slot not in reading.repairs:
                raise ViolationError(f"the log was said to be repaired at slot {slot}, and isn't")
            case ("held", folder, seen):
                held = folder, seen
            case ("let go",):
                held = None
            case _:
                continue
    if held is not None and not _lease_may_be_over(objects, held[1]):
        try:
            check_data(objects, reading.bodies[reading.commits[held[0]]])
        except ViolationError as violation:
            raise ViolationError(f"pinned: {violation}") from violation


def _lease_may_be_over(objects: Mapping[str, bytes], seen: int) -> bool:
    """Return whether so many entries came after the holder read the log that they may span its lease."""
    return max(slot_of(path) or 0 for path in objects) >= seen + LEASE_ENTRIES
