"""Define a rank's proposal to the coordinator of a save, with its rules, and the coordinator's answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from stepkeeper_planners.errors import ReleasesDifferError, WrongRanksError, format_ranks
from stepkeeper_planners.geometry.layout import TensorLayout
from stepkeeper_planners.saving.assignment import ASSIGNMENT_VERSION
from stepkeeper_planners.saving.differing_copies import Groups

__all__ = [
    "Answer",
    "Proposal",
    "check_proposals",
    "check_rules",
    "describe_rules",
    "group_by_fingerprint",
]


def describe_rules(world_size: int) -> str:
    """Describe the rules as text. Ranks with equal descriptions assign equal layouts alike."""
    return f"stepkeeper {_release()}, assignment {ASSIGNMENT_VERSION}, {world_size} ranks"


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
            "the ranks divide a save in different ways, so nothing was written: run the same release of stepkeeper "
            "on all ranks. "
            f"{listed[0].upper()}{listed[1:]}"
        )


@lru_cache(maxsize=1)
def _release() -> str:
    try:
        return version("stepkeeper")
    except PackageNotFoundError:
        # The package runs from its sources. Ranks with a version have another description.
        return "without a version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A rank's message to the coordinator, sent with its local plan."""

    rules: str
    """The rules by which it assigns writers. Keep this field first, where a rank of another release finds it."""
    rank: int
    fingerprint: bytes
    """The `fingerprint` of its state: equal on ranks with equal states."""
    parts: tuple[TensorLayout, ...]
    """This rank's part of the layouts that no rank can describe alone."""

    copies: Mapping[str, str]
    """The digests of the copies that this rank and others hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The coordinator's answer to all ranks."""

    groups: tuple[tuple[int, ...], ...]
    """The ranks of each fingerprint, the largest group first; one group if all ranks have the same state."""

    joined: tuple[TensorLayout, ...]
    """The layouts that no rank could describe alone."""

    differing: Mapping[str, Groups] | None
    """The ranks whose digests differ; None if layouts have changed, so that the ranks exchange digests of these."""


def check_proposals(plan_data: Sequence[object], world_size: int) -> list[Proposal]:
    """Check that every rank sent a proposal, and that all divide a state by the same rules.

    Args:
        plan_data: the planner data of each rank's plan, by rank.
        world_size: the number of ranks that the coordinator knows of.

    Returns:
        The proposals, by rank.

    Raises:
        WrongRanksError: the plans are not of the ranks that the coordinator knows of, or a rank has another planner.
        ReleasesDifferError: ranks would divide the same state in other ways.
    """
    proposals = [each for each in plan_data if isinstance(each, Proposal)]
    if len(plan_data) == world_size and len(proposals) < world_size:
        others = [rank for rank, each in enumerate(plan_data) if not isinstance(each, Proposal)]
        raise WrongRanksError(
            f"ranks {', '.join(map(str, others[:8]))}{', …' if len(others) > 8 else ''} use another planner: all "
            "ranks of a save must use SPMDSavePlanner, or none"
        )
    if [proposal.rank for proposal in proposals] != list(range(world_size)) or len(plan_data) != world_size:
        raise WrongRanksError(
            f"this save has {len(plan_data)} ranks, but the planner expects {world_size}: pass it the group of the "
            "save, SPMDSavePlanner(process_group=…)"
        )
    check_rules([proposal.rules for proposal in proposals])
    return proposals


def group_by_fingerprint(proposals: Sequence[Proposal]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each fingerprint, the largest group first."""
    groups: dict[bytes, list[int]] = {}
    for proposal in proposals:
        groups.setdefault(proposal.fingerprint, []).append(proposal.rank)
    return tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks)))
