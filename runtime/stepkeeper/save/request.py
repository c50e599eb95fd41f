"""Define the request for one save, which passes unchanged from the train loop to the snapshot."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, SupportsIndex

import torch

from stepkeeper.save.given_state import GivenState

__all__ = ["SaveRequest", "validate_step"]

_STEPS_END: Final = 1 << 63


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

    on_tensors: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    """Called with the state's tensors once they were copied, in the thread that starts the save."""


def validate_step(step: SupportsIndex) -> int:
    """Convert a step of any library's integer type to an int.

    Raises:
        TypeError: `step` is no whole number.
        ValueError: `step` is negative, or no 64 bits have it.

    """
    number = operator.index(step)
    if not 0 <= number < _STEPS_END:
        raise ValueError(f"a step is a number of at least 0, and below 2**63, not {number}")
    return number
