"""What ranks tell one another about a restore: where their states don't fit the commit, and what went wrong."""

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
    """Nothing of a torn checkpoint stays in the state. Raises RestoreError, naming what would."""
    left = sorted(set(half_filled) - set(names))
    if left:
        raise RestoreError(
            f"{', '.join(left[:8])}{', …' if len(left) > 8 else ''}: filled in part from a checkpoint that turned out "
            "to be torn, and the one before it has nothing in their place. Build the state anew and restore again: "
            "the torn one isn't chosen any more"
        )


class Compared(Protocol):
    """A loading whose state was compared with what is stored."""

    @property
    def stored_names(self) -> tuple[str, ...]: ...


def judge_mismatch(loading: Compared, said: Sequence[dict[str, Any]]) -> Exception | None:
    """One report of where the ranks' states don't fit; names that only some ranks ask for are no reason."""
    found = [decode_findings(each["findings"]) if "findings" in each else None for each in said]
    differences = unexpected_everywhere(found, loading.stored_names)
    return mismatch(differences) if any(differences) else None


def encode_findings(findings: Findings) -> dict[str, Any]:
    """As another rank can be told them."""
    found = findings.differences
    lists = {name: list(getattr(found, name)) for name in _LISTS}
    return {**lists, "mismatched": dict(found.mismatched), "unexpected_bits": findings.unexpected_bits.hex()}


def decode_findings(said: dict[str, Any]) -> Findings:
    """What `encode_findings` was made of."""
    lists = {name: tuple(said[name]) for name in _LISTS}
    return Findings(
        differences=Differences(mismatched=said["mismatched"], **lists),
        unexpected_bits=bytes.fromhex(said["unexpected_bits"]),
    )


def encode_rank_error(error: Exception, rank: int) -> dict[str, Any]:
    """As the other ranks can be told what this one fails with."""
    said: dict[str, Any] = {**encode_error(error), "rank": rank}
    if isinstance(error, LoadMismatchError):
        said["mismatch"] = {name: getattr(error, name) for name in _MISMATCH}
    return said


def decode_rank_error(said: dict[str, Any]) -> Exception:
    """What another rank failed with: an error of its class, if that is one of ours or the planners'."""
    if "mismatch" in said:
        return LoadMismatchError(**said["mismatch"])
    message = f"rank {said['rank']}: {said['message']}"
    kind = getattr(planners_errors, said["kind"], None)
    if isinstance(kind, type) and issubclass(kind, PlannerError) and _takes_text(kind):
        return kind(message)
    return decode_error({"kind": said["kind"], "message": message})


def find_first_error(said: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of what the ranks said, the first error; None if none of them failed."""
    return next((each["error"] for each in said if "error" in each), None)


def _takes_text(kind: type[PlannerError]) -> bool:
    """Whether it is made of a message, as all are but those that compose theirs."""
    return not any("__init__" in vars(each) for each in kind.__mro__ if issubclass(each, PlannerError))
