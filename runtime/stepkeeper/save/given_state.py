"""Define the request for one save, check the given state, and call the function if one is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex

import torch

from stepkeeper.quantities import check_whole
from stepkeeper_planners.state.tree import is_stateful

__all__ = [
    "GivenState",
    "SaveRequest",
    "build_request",
    "build_state",
    "check_not_empty",
    "check_target",
    "name_entries",
]

GivenState = Mapping[str, object] | Callable[[], Mapping[str, object]]
"""A state, or a function that builds it. The function is called only when a save is due."""

_STEPS_END: Final = 1 << 63
_FORM: Final = "state is a dict, or an object with state_dict() and load_state_dict()"
_EMPTY: Final = (
    "the state is empty: a checkpoint of it would restore nothing. Pass the objects that training changes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A finished step, and its state. It is dropped with the snapshot: the state belongs to the training."""

    step: int
    state: GivenState
    metrics: Mapping[str, object] | None = None
    """The training's metrics of the step."""

    is_last: bool = False
    """True if no other save comes after it. Such a save goes directly to the root: its memory isn't needed early."""

    on_tensors: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    """Called with the state's tensors once they were copied, in the thread that starts the save."""


def build_request(
    step: SupportsIndex, state: GivenState, metrics: Mapping[str, object] | None
) -> SaveRequest:
    """Build the request for a save, from a step of any library's integer type. A function isn't called yet.

    Raises TypeError for a wrong type of an argument, ValueError for a step out of bounds or an empty state.
    """
    number = check_whole("step", step)
    if not 0 <= number < _STEPS_END:
        raise ValueError(f"a step is a number from 0 to 2**63 - 1, not {number}")
    if not _is_function(state):
        _check_state(state, "got")
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"metrics is a dict of numbers by name, not a value of type {type(metrics).__name__}")
    return SaveRequest(step=number, state=state, metrics=metrics)


def check_target(state: Mapping[str, object]) -> None:
    """Check that a restore can fill `state`. Raises TypeError if it's no state, ValueError if it's empty."""
    if _is_function(state):
        raise TypeError(
            "restore needs a state dict, not a function: call it, restore into the result, then use the result"
        )
    _check_state(state, "got")


def _is_function(state: object) -> bool:
    """Return True if `state` is a function that returns the state. Modules can be called too, but are states."""
    return callable(state) and not isinstance(state, type | Mapping) and not is_stateful(state)


def name_entries(state: object) -> frozenset[str]:
    """Return the names of a state's entries, but none below them, which may change: a list grows."""
    return frozenset(map(str, state)) if isinstance(state, Mapping) else frozenset()


def build_state(given: GivenState, step: int) -> Mapping[str, object]:
    """Return the state of `step`: the given one, or the result of the given function.

    Raises the function's own error, with a note, TypeError if it returned no state, ValueError for an empty one.
    """
    if not _is_function(given):
        return given  # type: ignore[return-value]  # _is_function has checked it
    function: Any = given
    try:
        state: Mapping[str, object] = function()
    except BaseException as error:
        error.add_note(f"raised by the function given as the state of step {step}")
        raise
    _check_state(state, f"the function given as the state of step {step} returned")
    return state


def _check_state(state: object, what: str) -> None:
    if isinstance(state, Mapping):
        if not state:
            raise ValueError(_EMPTY)
    elif not is_stateful(state):
        kind = (
            f"the class {state.__name__}"
            if isinstance(state, type)
            else f"a value of type {type(state).__name__}"
        )
        raise TypeError(f"{_FORM}; {what} {kind}")


def check_not_empty(*entries: object) -> None:
    """Check that at least one of these groups of a state's entries isn't empty. Raises ValueError."""
    if not any(entries):
        raise ValueError(_EMPTY)
