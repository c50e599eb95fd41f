"""Exchange among ranks where their states don't fit a checkpoint, and what went wrong in one of them."""

from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

from stepkeeper.error_codec import decode_error, encode_error
from stepkeeper.errors import RestoreError
from stepkeeper_planners import errors as planners_errors
from stepkeeper_planners.errors import LoadMismatchError, PlannerError
from stepkeeper_planners.loading.differences import Differences, Findings, mismatch, unexpected_everywhere

__all__ = [
    "Compared",
    "check_refilled",
    "decode_findings",
    "decode_rank_error",
    "encode_findings",
    "encode_rank_error",
    "find_first_error",
    "judge_mismatch",
]

_LISTS: Final = ("missing", "unexpected", "castable", "asked", "changing")
_MISMATCH: Final = ("missing", "unexpected", "mismatched", "ranks", "advice", "loaded")


def check_refilled(half_filled: Collection[str], names: Collection[str]) -> None:
    """Check that nothing of a torn checkpoint stays in the state.

    Raises RestoreError, which names what would stay.
    """
    left = sorted(set(half_filled) - set(names))
    if left:
        raise RestoreError(
            f"{', '.join(left[:8])}{', …' if len(left) > 8 else ''}: filled in part from a checkpoint that turned out "
            "to be torn, and the one before it has nothing in their place. Build the state anew and restore again: "
            "the torn one isn't chosen any more"
        )


class Compared(Protocol):
    """A loading whose state has been compared with what is stored."""

    @property
    def stored_names(self) -> tuple[str, ...]: ...


def judge_mismatch(loading: Compared, said: Sequence[dict[str, Any]]) -> Exception | None:
    """Merge the ranks' findings into one error. A name that only some ranks ask for is no mismatch.

    Args:
        loading: This rank's loading, which knows the names that are stored.
        said: The answers of all ranks, by rank.

    Returns:
        One LoadMismatchError for all ranks; None if the checkpoint fits.

    """
    found = [decode_findings(each["findings"]) if "findings" in each else None for each in said]
    differences = unexpected_everywhere(found, loading.stored_names)
    return mismatch(differences) if any(differences) else None


def encode_findings(findings: Findings) -> dict[str, Any]:
    """Encode the findings of one rank as plain JSON values."""
    found = findings.differences
    lists = {name: list(getattr(found, name)) for name in _LISTS}
    return {**lists, "mismatched": dict(found.mismatched), "unexpected_bits": findings.unexpected_bits.hex()}


def decode_findings(said: dict[str, Any]) -> Findings:
    """Decode what `encode_findings` has encoded."""
    lists = {name: tuple(said[name]) for name in _LISTS}
    return Findings(
        differences=Differences(mismatched=said["mismatched"], **lists),
        unexpected_bits=bytes.fromhex(said["unexpected_bits"]),
    )


def encode_rank_error(error: Exception, rank: int) -> dict[str, Any]:
    """Encode the error that `rank` fails with, so that the other ranks can raise it."""
    said: dict[str, Any] = {**encode_error(error), "rank": rank}
    if isinstance(error, LoadMismatchError):
        said["mismatch"] = {name: getattr(error, name) for name in _MISMATCH}
    return said


def decode_rank_error(said: dict[str, Any]) -> Exception:
    """Make the error that another rank failed with: of its class, if that is one of ours or of the planners."""
    if "mismatch" in said:
        return LoadMismatchError(**said["mismatch"])
    message = f"rank {said['rank']}: {said['message']}"
    kind = getattr(planners_errors, said["kind"], None)
    if isinstance(kind, type) and issubclass(kind, PlannerError) and _takes_text(kind):
        return kind(message)
    return decode_error({"kind": said["kind"], "message": message})


def find_first_error(said: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Find the first error among the answers of all ranks; None if no rank failed."""
    return next((each["error"] for each in said if "error" in each), None)


def _takes_text(kind: type[PlannerError]) -> bool:
    """Tell whether the class is made from a message, as all are but those that compose their own."""
    return not any("__init__" in vars(each) for each in kind.__mro__ if issubclass(each, PlannerError))
