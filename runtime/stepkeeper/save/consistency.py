"""Compare the states that the ranks are about to save, in the background and before anything is written."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import CopiesDifferError, SaveError
from stepkeeper_planners.errors import RanksDifferError, ReleasesDifferError
from stepkeeper_planners.saving.copies import CopyDigests
from stepkeeper_planners.saving.differing_copies import Groups, group_ranks
from stepkeeper_planners.saving.fingerprints import build_ranks_differ_error, fingerprint
from stepkeeper_planners.saving.proposals import check_rules, describe_rules

__all__ = ["check_same_state"]

_MAX_COMPARED: Final = 8
"""If ranks differ, the names of this many different states are compared. An error lists this many refusals or ranks."""


def check_same_state(
    save: str,
    step: int,
    digest: Callable[[], dict[str, bytes]] | None,
    rank_group: RankGroup,
    *,
    refusal: str | None = None,
    copies: CopyDigests | None = None,
    is_first: bool = False,
    transfer_bytes: int = 0,
) -> dict[str, Groups]:
    """Check that all ranks save the same step and state, except for `PerRank` values, and divide it alike.

    All ranks call this. Each sends a digest to rank 0; names are compared only where these differ.

    Args:
        save: The ranks' name for this save.
        step: The step to save.
        digest: Computes the digests of this rank's snapshot; None if it has no snapshot.
        rank_group: All ranks.
        refusal: The reason why this rank has no snapshot; None if it has one.
        copies: The digests of the copies that this rank holds.
        is_first: Whether this rank compares them before its snapshot, and decides about those that differ.
        transfer_bytes: Number of bytes that this rank's devices had to transfer before. A rank whose devices
            have more, or are slower, reports its progress, and the others wait as long as it makes some.

    Returns:
        With `is_first`, the ranks whose copies differ, for each set of ranks that hold some. See `group_ranks`.

    Raises:
        RanksDifferError: The states differ; the error names the difference. All ranks raise it.
        CopiesDifferError: Copies differ without `is_first`, or only some ranks have set that. All ranks raise it.
        SaveError: A rank has no snapshot, saves another step, or has other rules. All ranks raise it.
    """
    if rank_group.world_size == 1:
        return {}
    digests = {} if digest is None else digest()
    proposal = {
        "rules": describe_rules(rank_group.world_size),
        "refusal": refusal,
        "step": step,
        "fingerprint": fingerprint(digests).hex(),
        "copies": {} if copies is None else copies.combine(),
        "is_first": is_first,
    }
    limits = rank_group.limits
    limit_s = limits.apart_s + (limits.transfer_s(transfer_bytes) if transfer_bytes else 0.0)
    proposals = rank_group.gather(f"{save}/state", proposal, limit_s)
    verdict = rank_group.broadcast(
        f"{save}/same", _judge_proposals(proposals) if proposals else None, 2 * limit_s
    )
    limits.note_meeting()
    if verdict["error"] is not None:
        raise SaveError(verdict["error"])
    groups: list[list[int]] = verdict["groups"]
    if groups:
        raise _build_difference(save, groups, digests, rank_group)
    differing: dict[str, Groups] = verdict["copies"]
    if verdict["is_mixed"] or (differing and not is_first):
        raise CopiesDifferError(
            "the ranks' copies of some tensors differ, or not all ranks were about to compare them. Nothing was "
            "written; the next save names the tensors, and writes the first rank's or is refused"
        )
    return differing


def _judge_proposals(proposals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the proposals on rank 0: return an error, or the ranks of each fingerprint if there are several."""
    refusals = [f"rank {rank}: {each['refusal']}" for rank, each in enumerate(proposals) if each["refusal"]]
    if refusals:
        return {"error": f"no snapshot of step {proposals[0]['step']}: {'; '.join(refusals[:_MAX_COMPARED])}"}
    try:
        check_rules([proposal["rules"] for proposal in proposals])
    except ReleasesDifferError as error:
        return {"error": str(error)}
    steps: dict[int, list[int]] = {}
    ranks_by_fingerprint: dict[str, list[int]] = {}
    for rank, proposal in enumerate(proposals):
        steps.setdefault(proposal["step"], []).append(rank)
        ranks_by_fingerprint.setdefault(proposal["fingerprint"], []).append(rank)
    if len(steps) > 1:
        texts = (f"step {step} on ranks {ranks[:_MAX_COMPARED]}" for step, ranks in steps.items())
        return {"error": f"the ranks save different steps: {', '.join(texts)}"}
    largest_first = sorted(ranks_by_fingerprint.values(), key=lambda ranks: (-len(ranks), ranks))
    return {
        "error": None,
        "groups": largest_first if len(largest_first) > 1 else [],
        "copies": group_ranks([proposal["copies"] for proposal in proposals]),
        "is_mixed": len({proposal["is_first"] for proposal in proposals}) > 1,
    }


def _build_difference(
    save: str, groups: Sequence[Sequence[int]], digests: Mapping[str, bytes], rank_group: RankGroup
) -> RanksDifferError:
    """Build the same error on all ranks, from the digests of the first rank of each group."""
    compared = groups[:_MAX_COMPARED]
    sends_digests = any(rank_group.rank == ranks[0] for ranks in compared)
    sent = {name: digest.hex() for name, digest in digests.items()} if sends_digests else {}
    limit_s = rank_group.limits.silence_s
    reports = rank_group.gather(f"{save}/digests", sent, limit_s)
    found: dict[str, Any] | None = None
    if reports:
        of_group = (reports[ranks[0]] for ranks in compared)
        decoded = [{name: bytes.fromhex(digest) for name, digest in each.items()} for each in of_group]
        n_unseen = sum(len(ranks) for ranks in groups[_MAX_COMPARED:])
        error = build_ranks_differ_error(list(zip(compared, decoded, strict=True)), n_unseen)
        found = {"reasons": error.reasons, "ranks": error.ranks, "n_unseen": error.n_unseen}
    found = rank_group.broadcast(f"{save}/difference", found, 2 * limit_s)
    return RanksDifferError(**found)
