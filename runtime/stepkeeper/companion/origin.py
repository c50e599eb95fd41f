"""Define the base that a claim goes on from: the commit, or another writer's step, that this process has restored."""

from dataclasses import dataclass, replace

from stepkeeper.companion.messages import Begun, ClaimRequest
from stepkeeper.log import ForeignBase

__all__ = ["NextClaim", "Origin", "goes_on_from", "with_origin"]


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
    origin: Origin


def goes_on_from(begun: Begun, origin: Origin) -> bool:
    """Tell whether the claim `begun` goes on from `origin`."""
    if isinstance(origin.base, ForeignBase):
        return begun.legacy is not None and begun.legacy.folder == origin.base.folder
    return begun.base is not None and begun.base.slot == origin.base


def with_origin(body: ClaimRequest, origin: Origin) -> ClaimRequest:
    """Return `body` with `origin` as what the claim is to go on from."""
    if isinstance(origin.base, ForeignBase):
        return replace(body, legacy=origin.base)
    return replace(body, base=origin.base)
