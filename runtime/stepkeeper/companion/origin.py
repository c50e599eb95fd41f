"""Tell what a claim goes on from: the commit, or another writer's step, that this process has restored."""

from dataclasses import dataclass, replace

from stepkeeper.companion.messages import Begin, Begun
from stepkeeper.log import LegacyBase

__all__ = ["NextClaim", "Origin", "goes_on_from", "with_origin"]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What a state was restored from: each restore has its own, also of the same commit."""

    base: int | LegacyBase


@dataclass(frozen=True, slots=True, kw_only=True)
class NextClaim:
    """Another claim of this process, after the one that it has; put or not, as long as there was no answer."""

    body: Begin
    origin: Origin


def goes_on_from(begun: Begun, origin: Origin) -> bool:
    if isinstance(origin.base, LegacyBase):
        return begun.legacy is not None and begun.legacy.folder == origin.base.folder
    return begun.base is not None and begun.base.slot == origin.base


def with_origin(body: Begin, origin: Origin) -> Begin:
    if isinstance(origin.base, LegacyBase):
        return replace(body, legacy=origin.base)
    return replace(body, base=origin.base)
