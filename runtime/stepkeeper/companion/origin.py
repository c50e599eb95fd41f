"""Define the base that a claim goes on from: the commit, or another writer's step, that this process has restored."""

from dataclasses import dataclass, replace

from stepkeeper.companion.messages import ClaimedRoot, ClaimRequest
from stepkeeper.log import ForeignBase

__all__ = ["NextClaim", "Origin", "is_claim_from", "set_claim_base"]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The commit, or another writer's step, that a state was restored from.

    Two restores have two origins, also when they restored the same commit.
    """

    base: int | ForeignBase
    """Slot of the commit, or the other writer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextClaim:
    """A further claim of this process. Until its request is answered, it may or may not be in the log."""

    body: ClaimRequest
    origin: Origin | None = None
    """What it goes on from; None if it begins a branch."""

    branch_step: int | None = None
    """The step that a branch is to begin with; None if it goes on from `origin`."""


def is_claim_from(claimed: ClaimedRoot, origin: Origin) -> bool:
    """Tell whether `claimed` goes on from `origin`."""
    if isinstance(origin.base, ForeignBase):
        return claimed.legacy is not None and claimed.legacy.folder == origin.base.folder
    return claimed.base is not None and claimed.base.slot == origin.base


def set_claim_base(body: ClaimRequest, origin: Origin) -> ClaimRequest:
    """Return `body` with `origin` as what the claim is to go on from."""
    if isinstance(origin.base, ForeignBase):
        return replace(body, legacy=origin.base)
    return replace(body, base=origin.base)
