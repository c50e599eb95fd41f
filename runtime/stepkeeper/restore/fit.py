"""Judge whether the states of all ranks fit the checkpoint: each rank reports where its own doesn't."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

from stepkeeper.errors import PartlyRestoredError
from stepkeeper_planners.loading.differences import (
    Differences,
    Findings,
    intersect_unexpected,
    judge_differences,
)

__all__ = ["check_refilled", "encode_findings", "judge_mismatch"]

_LISTS: Final = ("missing", "unexpected", "castable", "asked", "changing", "optimizers", "primed")
_DICTS: Final = ("mismatched", "left_over")


def check_refilled(half_filled: Collection[str], names: Collection[str]) -> None:
    """Check that this restore replaces all that a failed one has half filled. Raises PartlyRestoredError."""
    if not half_filled:
        return
    # An empty dict is a value under its own name. Filled, it has names below that one instead. So a name is replaced if
    # this restore fills it, or one above or below it.
    filled_or_above = {above for name in names for above in _list_above(name)}
    left = [
        name
        for name in sorted(half_filled)
        if name not in filled_or_above and not any(above in names for above in _list_above(name))
    ]
    if left:
        raise PartlyRestoredError(
            f"{', '.join(left[:8])}{', …' if len(left) > 8 else ''}: partly filled by a restore that failed, and "
            "this one lacks them, or leaves them out: restore all of the state. If no step has all of it, restart "
            "the program; a commit that was found to be torn isn't chosen again"
        )


def _list_above(name: str) -> Iterable[str]:
    """Return the name and all names above it."""
    return accumulate(name.split("."), "{}.{}".format)


def encode_findings(differences: Differences, stored_names: Iterable[str], *, rank: int) -> dict[str, Any]:
    """Encode this rank's mismatches for the others as plain JSON values. All but rank 0 send few names."""
    if differences.is_none:
        return {}
    findings = Findings.from_differences(differences, stored_names, short=rank != 0)
    found = findings.differences
    lists = {name: list(getattr(found, name)) for name in _LISTS}
    dicts = {name: dict(getattr(found, name)) for name in _DICTS}
    encoded = {**lists, **dicts, "strict": found.strict, "unexpected_bits": findings.unexpected_bits.hex()}
    return {"findings": encoded}


def judge_mismatch(
    stored_names: Callable[[], Iterable[str]], reports: Sequence[dict[str, Any]]
) -> Exception | None:
    """Merge the reports of all ranks, by rank, into one LoadMismatchError; None if the checkpoint fits.

    A name that only some ranks request isn't a mismatch. If the checkpoint fits, names that one side lacks are logged.
    """
    found = [_decode(each["findings"]) if "findings" in each else None for each in reports]
    return judge_differences(intersect_unexpected(found, stored_names()))


def _decode(encoded: dict[str, Any]) -> Findings:
    """Decode the result of `encode_findings`."""
    lists: dict[str, Any] = {name: tuple(encoded[name]) for name in _LISTS}
    return Findings(
        differences=Differences(**lists, **{name: encoded[name] for name in (*_DICTS, "strict")}),
        unexpected_bits=bytes.fromhex(encoded["unexpected_bits"]),
    )
