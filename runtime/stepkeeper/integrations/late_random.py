"""Hold restored random numbers until the trainer has drawn all that it draws before its next step."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepkeeper_planners import RandomState

__all__ = ["LateRandomState", "first_of_ranks"]


class LateRandomState:
    """Save the global random number generators as a `RandomState` does, and set them only when `set` is called.

    A trainer that resumes draws random numbers between the restore and its next step: for the order of the data, for
    workers. The step must begin with the numbers that the interrupted training would have drawn.
    """

    def __init__(self) -> None:
        self._restored: Mapping[str, Any] | None = None
        self._kept: dict[str, Any] | None = None

    def keep(self) -> None:
        """Save the generators as they are now, in every later save, until this is called again."""
        self._kept = RandomState().state_dict()

    def set(self) -> None:
        """Set the generators to the restored state, if there is one that wasn't set yet."""
        if self._restored is not None:
            RandomState().load_state_dict(self._restored)
            self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Return the kept state of the generators, or the present one."""
        return RandomState().state_dict() if self._kept is None else self._kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold `state` for `set`."""
        self._restored = state


def first_of_ranks(values: Sequence[object], _: object) -> object:
    """Give each rank the position of rank 0, where another number of ranks had saved."""
    return values[0]
