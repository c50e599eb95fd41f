"""Compare the copies that ranks hold, in as few messages as the difference needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from stepkeeper_planners.saving.copies import CopyDigests
from stepkeeper_planners.saving.differing_copies import OWN_VALUE, CopyRules, CopyVerdict, Groups

__all__ = ["Answer", "Exchange", "HeldDigests", "compare_copies", "group_ranks"]

_MAX_COMPARED: Final = 8
"""The most different copies of one chunk of which tensors are named and judged."""


Answer = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""Makes an answer for all ranks from their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDigests:
    """The digests of the copies of tensors that this rank and others hold, and what can judge a difference."""

    digests: CopyDigests
    exact: frozenset[str] = frozenset()
    """The result of `CopyRules.exact`."""

    rules: CopyRules | None = None
    """The rules for the state; None once its elements may have changed."""


class Exchange(Protocol):
    """Give all ranks the answer to their values. Each exchange has a name."""

    def __call__(self, name: str, value: Mapping[str, Any], answer: Answer, /) -> Mapping[str, Any]: ...


def group_ranks(digests: Sequence[Mapping[str, str]]) -> dict[str, Groups]:
    """Group the ranks by equal digests, for each key under which they differ. The first rank's group comes first.

    Args:
        digests: the digests by rank and key. A rank may lack some keys.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for rank, own in enumerate(digests):
        for key, digest in own.items():
            found.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {key: list(groups.values()) for key, groups in found.items() if len(groups) > 1}


def compare_copies(
    differing: Mapping[str, Groups],
    own: HeldDigests,
    rank: int,
    exchange: Exchange,
    *,
    parties: Sequence[Sequence[int]] = (),
) -> CopyVerdict:
    """Find the tensors whose copies differ, and judge them if all ranks still have the whole copies.

    Args:
        differing: the result of `group_ranks` for the combined digests.
        own: this rank's digests.
        rank: this rank.
        exchange: exchanges values with the other ranks.
        parties: see `CopyRules.judge`.

    Returns:
        The verdict, the same on all ranks. If some rank can't sample its copies, it names the tensors, and
        refuses the save only for those that are exact.

    Ranks: all ranks call this.
    """
    of_group = {
        key: {group[0]: group for group in groups[:_MAX_COMPARED]} for key, groups in differing.items()
    }
    digests = {key: own.digests.list_names(key) for key, asked in of_group.items() if rank in asked}

    def find_names(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        found = []
        for key, asked in of_group.items():
            named = group_ranks([report["digests"].get(key, {}) for report in reports])
            found += [
                (name, [[rank for first in firsts for rank in asked[first]] for firsts in groups])
                for name, groups in named.items()
            ]
        exact = [name for name, _ in found if name in own.exact]
        return {"found": found, "exact": exact, "judged": all(report["judged"] for report in reports)}

    names = exchange("names", {"digests": digests, "judged": own.rules is not None}, find_names)
    rules = own.rules
    if rules is None or not names["judged"]:
        ranks = {name: sorted({r for group in groups[1:] for r in group}) for name, groups in names["found"]}
        return CopyVerdict(ranks=ranks, reasons=dict.fromkeys(names["exact"], OWN_VALUE), first=())
    asked = {name for name, groups in names["found"] if rank in {group[0] for group in groups}}
    verdict = exchange(
        "samples",
        {name: rules.sample(name) for name in sorted(asked)},
        lambda samples: _describe(rules.judge(names["found"], samples, parties=parties)),
    )
    return CopyVerdict(ranks=verdict["ranks"], reasons=verdict["reasons"], first=tuple(verdict["first"]))


def _describe(verdict: CopyVerdict) -> dict[str, Any]:
    return {"ranks": verdict.ranks, "reasons": verdict.reasons, "first": list(verdict.first)}
