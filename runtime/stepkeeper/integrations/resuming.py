"""Share what the integrations resume by: late random numbers, names of objects, and checks of a library's release."""

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from stepkeeper_planners import RandomState

__all__ = ["KNOWN", "LateRandomState", "check_attributes", "first_of_ranks", "name_objects"]

KNOWN: Final = {"accelerate": "1.15", "lightning": "2.6", "transformers": "5.24"}
"""The releases whose attributes the integrations use that aren't public."""


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


def name_objects(name: str, objects: Iterable[object]) -> dict[str, object]:
    """Name the first object `name`, and the others `name_1` and so on."""
    return {f"{name}_{number}" if number else name: each for number, each in enumerate(objects)}


def check_attributes(library: str, owner: object, *names: str) -> None:
    """Raise ImportError if `owner`, of `library`, lacks an attribute that isn't public, and so may be gone."""
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise ImportError(
            f"{library} {importlib.metadata.version(library)} has no {type(owner).__name__}.{missing[0]}, which a "
            f"resume needs: install {library} {KNOWN[library]}, or a release of stepkeeper that knows this one"
        )
