"""Compare the rules by which ranks assign writers.

Each rank computes the assignment for itself: with different rules, their parts of a checkpoint would not fit together.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from stepkeeper_planners.errors import ReleasesDifferError, format_ranks
from stepkeeper_planners.saving.assignment import ASSIGNMENT_VERSION, BALANCE

__all__ = ["check_rules", "describe_rules"]


def describe_rules(world_size: int) -> str:
    """Describe the rules in words for people. Ranks with equal descriptions assign equal layouts alike."""
    balance = ", ".join(f"{name} {number}" for name, number in BALANCE.items())
    return f"stepkeeper {_release()}, assignment {ASSIGNMENT_VERSION}, {world_size} ranks, {balance}"


def check_rules(rules: Sequence[str]) -> None:
    """Check that all ranks have the same rules, which are given by rank.

    Raises:
        ReleasesDifferError: they differ. Two ranks might write the same element, or none might write it, and the
            checkpoint would be wrong without an error.
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
        # The package runs from its sources. Ranks that don't have another description.
        return "without a version"
