"""Define the request for one save, which passes unchanged from the train loop to the snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepkeeper.save.given_state import GivenState

__all__ = ["SaveRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A finished step, and its state.

    The request is dropped with the snapshot, because the state is the training's.
    """

    step: int
    state: GivenState
    metrics: Mapping[str, object] | None = None
    """The training's metrics of the step."""

    is_last: bool = False
    """True if no other save comes after it. Such a save goes to the root at once: its memory need not be freed
    early.
    """
