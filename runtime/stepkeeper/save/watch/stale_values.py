"""Notice values that a training put into its state once and then forgot to update."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import Path, is_stateful, join_path
from stepkeeper_planners.state.whole import Whole

__all__ = ["StaleValues", "is_counter"]

_SAVES: Final = 3
"""A value is stale if it is the same in so many saves of different steps."""

_COUNTER: Final = re.compile(
    r"it|global_steps|updates"
    r"|((global|current|cur|train|training)_)?(step|iter|iteration|update)(_(num|number|idx|index|count))?"
    r"|(n|num)_updates"
    r"|((n|num)_)?(steps|updates|batches|samples|tokens|examples)_(seen|done|consumed|processed|trained)"
    r"|(seen|consumed|processed|trained)_(steps|updates|batches|samples|tokens|examples)"
)
"""Names of numbers that each step changes. Not `n_steps` or `steps`, which are its length, nor `epoch`, which may stay
the same for a thousand saves: see `ForgottenValues`."""

_RANDOM: Final = re.compile(r"(.*_)?(rng|random|rng_state|random_state|rng_states|random_states)")
"""Names of the states of random number generators."""


@dataclass(slots=True)
class _Watched:
    """A value that should change, and what it was in the last saves."""

    is_random: bool
    last: object = None
    version: int | None = None
    """Of a tensor: how often it was changed in place."""

    steps: list[int] = field(default_factory=list)
    """The steps that were saved with this value."""


class StaleValues:
    """Watch a state's counters and generator states from save to save.

    Only what stands in the training's own dicts and lists is watched, and only under names that tell what it is:
    constants, such as hyperparameters, are no mistake. A state of a generator counts as the same only if it is the very
    object: one that is read anew for each save is another one, even if no number was drawn.
    """

    def __init__(self) -> None:
        self._watched: dict[Path, _Watched] | None = None

    def find_stale(self, step: int, state: Mapping[str, object]) -> str | None:
        """Compare `state` with the saves before this one.

        Returns:
            What to tell the user; None if nothing is stale, or it was told before.

        """
        if self._watched is None:
            self._watched = {} if is_stateful(state) else dict(_find_watched(state, (), is_random=False))
        stale = [
            (path, watched)
            for path, watched in self._watched.items()
            if _note(watched, step, _look_up(state, path))
        ]
        if not stale:
            return None
        self._watched.clear()
        return " ".join(_describe(path, watched) for path, watched in stale)


def _find_watched(node: Any, path: Path, *, is_random: bool) -> Iterator[tuple[Path, _Watched]]:
    """Find what to watch below a node.

    Lists are passed over, unless they hold states of generators: the items of a log keep the step that they are of. So
    are dicts with number keys, as an optimizer's, whose step of a frozen parameter stays as it is.
    """
    node = node.value if isinstance(node, PerRank | Whole) else node
    if is_stateful(node):
        return
    if isinstance(node, Mapping) or (is_random and isinstance(node, list)):
        for key, item in node.items() if isinstance(node, Mapping) else enumerate(node):
            within = is_random or (isinstance(key, str) and _RANDOM.fullmatch(key.lower()) is not None)
            # There may be thousands of tensors.
            is_passed = not within and (isinstance(item, torch.Tensor | list) or not isinstance(key, str))
            if not is_passed:
                yield from _find_watched(item, (*path, key), is_random=within)
    elif is_random:
        if isinstance(node, tuple) or (isinstance(node, torch.Tensor) and node.dtype == torch.uint8):
            yield path, _Watched(is_random=True)
    elif _is_number(node) and is_counter(path[-1]):
        yield path, _Watched(is_random=False)


def is_counter(name: object) -> bool:
    """Return True if each step changes a number of this name."""
    return _COUNTER.fullmatch(str(name).lower()) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _look_up(state: object, path: Path) -> object:
    """Return what is at this path now; None if it isn't there any more."""
    node: Any = state
    for key in path:
        node = node.value if isinstance(node, PerRank | Whole) else node
        if isinstance(node, Mapping):
            node = node.get(key)
        else:
            node = node[key] if isinstance(node, list) and isinstance(key, int) and key < len(node) else None
    return node.value if isinstance(node, PerRank | Whole) else node


def _note(watched: _Watched, step: int, value: object) -> bool:
    """Note the value of a save. Return True if it is stale now."""
    version = value._version if isinstance(value, torch.Tensor) else None  # noqa: SLF001 — torch has no other name
    if watched.is_random:
        same = value is watched.last and version == watched.version
    else:
        same = _is_number(value) and value == watched.last
    if not same or value is None:
        watched.last, watched.version, watched.steps = value, version, [step]
    elif step > watched.steps[-1]:
        watched.steps.append(step)
    return len(watched.steps) >= _SAVES


def _describe(path: Path, watched: _Watched) -> str:
    name, first, last = join_path(path), watched.steps[0], watched.steps[-1]
    if watched.is_random:
        return (
            f"{name} in the state is the same object in the saves of step {first} to {last}: it says where a generator "
            "was when the state was built, and nothing sets the generator after a restore. Put RandomState() in its "
            "place."
        )
    return (
        f"{name} in the state was {watched.last} in the saves of step {first} to {last}, so a restart would find "
        f"{watched.last}. If it counts on, set it before each save, or give a function that builds the state: "
        "manager.step(step, lambda: {...}). The restored step itself is in RestoreResult.step."
    )
