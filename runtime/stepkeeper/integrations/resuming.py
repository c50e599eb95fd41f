"""Share what the integrations resume by: saves of a trainer's state, its random numbers, and checks of releases."""

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from stepkeeper.manager import CheckpointManager
from stepkeeper.results import RestoreResult
from stepkeeper_planners import RandomState

__all__ = ["KNOWN", "LateRandomState", "SavedTraining", "check_attributes", "first_of_ranks", "name_objects"]

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


class SavedTraining:
    """Restore a trainer's state and random numbers, and save them after the steps that it finishes."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._state: dict[str, object] = {}
        self.step = 0
        """The last finished step."""

        self.random = LateRandomState()
        self.epoch_random = LateRandomState()
        """Those with which the present epoch began: samplers and workers draw from them."""

    def restore(self, state: Mapping[str, object]) -> RestoreResult | None:
        """Restore the latest commit into `state`, which all later saves read. Raises as the manager does."""
        self._state = {**state, "random": self.random, "epoch_random": self.epoch_random}
        restored = self._manager.restore(self._state)
        self.step = restored.step if restored else 0
        return restored

    def begin_epoch(self) -> None:
        """Let the epoch draw the restored random numbers, and keep those with which it begins."""
        self.epoch_random.set()
        self.epoch_random.keep()

    def finish_step(self, step: int, metrics: Mapping[str, object] | None) -> None:
        """Save `step` if it is due, unless it was finished before. After a notice, end the process with code 75."""
        if step == self.step:
            return
        self.step = step
        if self._manager.step(step, self._state, metrics).stop:
            self._manager.close()


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
