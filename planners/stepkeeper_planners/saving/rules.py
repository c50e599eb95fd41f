"""By which rules ranks find out who writes what: each for itself, so with other rules parts would not fit together."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from stepkeeper_planners.errors import ReleasesDifferError, format_ranks
from stepkeeper_planners.saving.assignment import ASSIGNMENT_VERSION, BALANCE

__all__ = ["check_rules", "describe_rules"]


def describe_rules(world_size: int) -> str:
    """Equal on ranks that assign equal layouts alike; what it says is for people."""
    balance = ", ".join(f"{name} {number}" for name, number in BALANCE.items())
    return f"stepkeeper {_release()}, assignment {ASSIGNMENT_VERSION}, {world_size} ranks, {balance}"


def check_rules(rules: Sequence[str]) -> None:
    """The ranks, of which these are the rules by rank, have the same.

    Raises:
        ReleasesDifferError: they haven't. Where one rank writes what another thinks is its own, or neither does, the
            checkpoint would be wrong without a word.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(rules):
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) > 1:
        listed = "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
        raise ReleasesDifferError(
            "the ranks divide a save in different ways, so nothing was written: run one release of stepkeeper on all. "
            f"{listed[0].upper()}{listed[1:]}"
        )


@lru_cache(maxsize=1)
def _release() -> str:
    try:
        return version("stepkeeper")
    except PackageNotFoundError:
        # Run from its sources: all ranks do, or the others have another text.
        return "without a version"
