"""Compare the copies that ranks hold, in as few messages as the difference needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from stepkeeper_planners.errors import RanksDifferError
from stepkeeper_planners.saving.copies import CopyDigests
from stepkeeper_planners.saving.differing_copies import CopyVerdict, Groups, judge, make_sampler
from stepkeeper_planners.state.tree import FlatState

__all__ = ["Answer", "compare_copies", "group_ranks"]

_MAX_COMPARED: Final = 8
"""The most different copies of one chunk of which tensors are named and judged."""

Answer = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""Makes an answer for all ranks from their values."""


def group_ranks(digests: Sequence[Mapping[str, str]]) -> dict[str, Groups]:
    """Group the ranks by equal digests, for each key under which they differ. The first rank's group comes first.

    `digests` has those of each rank by key. A rank may lack some keys.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for rank, own in enumerate(digests):
        for key, digest in own.items():
            found.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {key: list(groups.values()) for key, groups in found.items() if len(groups) > 1}


def compare_copies(
    differing: Mapping[str, Groups],
    digests: CopyDigests,
    flat: FlatState,
    rank: int,
    exchange: Callable[[str, Mapping[str, Any], Answer], Mapping[str, Any]],
    *,
    parties: Sequence[Sequence[int]] = (),
) -> CopyVerdict | None:
    """Find the tensors of `flat` whose copies differ, and judge them. All ranks call this.

    `differing` is the result of `group_ranks` for the combined digests of all ranks. `exchange` gives all ranks the
    answer to their values; each exchange has a name. For `parties` see `judge`.
    Returns the same verdict on all ranks; None if no copies differ. Raises RanksDifferError on
    all ranks if the save is refused.
    """
    if not differing:
        return None
    of_group = {
        key: {group[0]: group for group in groups[:_MAX_COMPARED]} for key, groups in differing.items()
    }

    def find_names(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return {
            "found": [
                (name, [[rank for first in firsts for rank in asked[first]] for firsts in groups])
                for key, asked in of_group.items()
                for name, groups in group_ranks([report.get(key, {}) for report in reports]).items()
            ]
        }

    own = {key: digests.list_names(key, flat.tensors) for key, asked in of_group.items() if rank in asked}
    found: list[tuple[str, Groups]] = exchange("names", own, find_names)["found"]
    if not found:
        return None
    sample = make_sampler(flat)
    samples = {name: sample(name) for name, groups in found if rank in {group[0] for group in groups}}
    verdict = CopyVerdict(**exchange("samples", samples, lambda those: asdict(judge(found, those, parties))))
    if verdict.reasons:
        refused = {name: verdict.ranks[name] for name in verdict.reasons}
        raise RanksDifferError(reasons=verdict.reasons, ranks=refused)
    return verdict
