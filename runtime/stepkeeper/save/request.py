"""Ask for one save: what a train loop hands over, passed on unchanged until its snapshot is taken."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SaveRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A finished step, and the state that came of it. It is dropped with the snapshot: the state is the training's."""

    step: int
    state: Mapping[str, object]
    metrics: Mapping[str, object] | None = None
    """What the training says of the step."""

    is_last: bool = False
    """No other save comes after it: it goes to the root at once, and nobody needs its memory again."""
