"""Judge whether the states of all ranks fit what is stored: each tells the others where its own doesn't."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

from stepkeeper.errors import PartlyRestoredError
from stepkeeper_planners.loading.differences import (
    Differences,
    Findings,
    build_mismatch_error,
    intersect_unexpected,
)

__all__ = ["check_refilled", "judge_mismatch", "tell_findings"]

_LISTS: Final = ("missing", "unexpected", "castable", "asked", "changing", "optimizers", "primed")


def check_refilled(half_filled: Collection[str], names: Collection[str]) -> None:
    """Check that nothing of a checkpoint whose restore has failed stays in the state.

    Raises PartlyRestoredError, which names what would stay.
    """
    filled = {above for name in names for above in _list_above(name)}
    # What was empty before has names of its own once it is filled, and what has some may be empty in another step.
    left = [
        name
        for name in sorted(half_filled)
        if name not in filled and not any(above in names for above in _list_above(name))
    ]
    if left:
        raise PartlyRestoredError(
            f"{', '.join(left[:8])}{', …' if len(left) > 8 else ''}: filled in part by a restore that failed, and this "
            "one has nothing in their place, or leaves them out: restore all of the state. If no step has all of it, "
            "start the program again; a commit that was found to be torn isn't chosen any more"
        )


def _list_above(name: str) -> Iterable[str]:
    """Return the name and all names above it."""
    return accumulate(name.split("."), "{}.{}".format)


def tell_findings(differences: Differences, stored_names: Iterable[str], *, rank: int) -> dict[str, Any]:
    """Encode for the other ranks, as plain JSON values, where the state of this one doesn't fit.

    Args:
        differences: The differences that this rank has found.
        stored_names: Names of the tensors and values that are stored, the same on all ranks.
        rank: This rank. All but rank 0 send a bounded number of names.

    """
    if not differences:
        return {}
    findings = Findings.from_differences(differences, stored_names, short=rank != 0)
    found = findings.differences
    lists = {name: list(getattr(found, name)) for name in _LISTS}
    said = {**lists, "mismatched": dict(found.mismatched), "unexpected_bits": findings.unexpected_bits.hex()}
    return {"findings": said}


def judge_mismatch(
    stored_names: Callable[[], Iterable[str]], said: Sequence[dict[str, Any]]
) -> Exception | None:
    """Merge the ranks' findings into one error. A name that only some ranks ask for is no mismatch.

    Args:
        stored_names: Returns the names that are stored.
        said: The answers of all ranks, by rank.

    Returns:
        One LoadMismatchError for all ranks; None if the checkpoint fits.

    """
    found = [_decode(each["findings"]) if "findings" in each else None for each in said]
    differences = intersect_unexpected(found, stored_names())
    return build_mismatch_error(differences) if any(differences) else None


def _decode(said: dict[str, Any]) -> Findings:
    """Decode what `tell_findings` has encoded."""
    lists = {name: tuple(said[name]) for name in _LISTS}
    return Findings(
        differences=Differences(mismatched=said["mismatched"], **lists),
        unexpected_bits=bytes.fromhex(said["unexpected_bits"]),
    )
