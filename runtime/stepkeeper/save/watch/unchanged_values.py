"""Notice values that a training put into its state once, and that stayed the same while its steps went on."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast
from weakref import ref

import numpy as np
import torch

from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import Path, is_stateful, join_path
from stepkeeper_planners.state.whole import Whole

__all__ = ["UnchangedValues"]

_SURE_SAVES: Final = 3
"""So many saves of different steps have to be alike for a value that by its name each step changes."""

_SAVES: Final = 5
"""The same for any other value, which may be slow or a constant."""

_SHOWN: Final = 20

_COUNTER: Final = re.compile(
    r"it|global_steps|updates"
    r"|((global|current|cur|train|training)_)?(step|iter|iteration|update)(_(num|number|idx|index|count))?"
    r"|(n|num)_updates"
    r"|((n|num)_)?(steps|updates|batches|samples|tokens|examples)_(seen|done|consumed|processed|trained)"
    r"|(seen|consumed|processed|trained)_(steps|updates|batches|samples|tokens|examples)"
)
"""Names of numbers that each step changes. Not `n_steps` or `steps`, which are its length, nor `epoch`, which may stay
the same for a thousand saves.
"""

_RANDOM: Final = re.compile(r"(.*_)?(rng|random|rng_state|random_state|rng_states|random_states)")
"""Names of the states of random number generators."""

_SETTINGS: Final = re.compile(
    r"(.*_)?(args?|arguments|cfg|config|configuration|defaults|hparams|hyper_?param(eter)?s|kwargs|meta|metadata|options|"
    r"params|parameters|settings)"
)
"""Names of dicts by which the training says that it never changes what is in them."""

_Still: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value in the training's own dicts, at one save."""

    value: object
    is_random: bool
    version: int | None
    """Of a tensor: how often it was changed in place."""

    stands: bool
    """True if it is in a dict that was there at the save before, rather than in one that was built for this save."""


class UnchangedValues:
    """Watch the plain values and generator states of a state from save to save, and tell of them once.

    Only what stands in the training's own dicts is watched: objects keep their own values up to date. A dict that is
    built for each save has the values of that moment, so only what counts by its name is told of then. A state of a
    generator is the same only if it is the very object: one that is read anew for each save is another one, even if
    no number was drawn.
    """

    def __init__(self) -> None:
        self._done = False
        self._same: dict[Path, _Value] = {}
        self._dicts: dict[Path, _Still] = {}
        self._steps: list[int] = []

    def find_unchanged(self, step: int, state: Mapping[str, object], *, is_built: bool = False) -> str | None:
        """Compare `state` with the saves before this one.

        Args:
            step: The step that is saved.
            state: Its state.
            is_built: True if a function of the training has built it for this save.

        Returns:
            What to tell the user; None if there is nothing to tell, or it was told before.

        """
        if self._done or (self._steps and step <= self._steps[-1]):
            return None
        dicts = dict(_walk(state, (), is_random=False))
        found = {
            (*path, key): value
            for path, (node, is_random) in dicts.items()
            for key, value in _values(node, is_random, stands=not is_built and self._stands(path, node))
        }
        same = {
            name: value
            for name, value in self._same.items()
            if name in found and _is_same(name, value, found[name])
        }
        self._same = same if self._steps else found
        self._steps.append(step)
        self._dicts = {path: _remember(node) for path, (node, _) in dicts.items()}
        sure = {name for name, value in self._same.items() if _is_sure(name, value)}
        if not self._same or len(self._steps) >= (_SURE_SAVES if sure else _SAVES):
            return self._end(sure)
        return None

    def _stands(self, path: Path, node: Any) -> bool:
        return not self._steps or (path in self._dicts and self._dicts[path](node))

    def _end(self, sure: set[Path]) -> str | None:
        """Let go of the state, for good, and return what to tell of it."""
        said = _describe(self._same, sure, self._steps[0], self._steps[-1]) if self._same else None
        self._done = True
        self._same, self._dicts, self._steps = {}, {}, []
        return said


def _walk(node: Any, path: Path, *, is_random: bool) -> Iterator[tuple[Path, tuple[Any, bool]]]:
    """Walk through the training's own dicts, and tell which hold states of generators.

    Lists are passed over, unless they hold such states: the items of a log keep the step that they are of. So are
    dicts with number keys, as an optimizer's, whose step of a frozen parameter stays as it is, and settings.
    """
    node = node.value if isinstance(node, PerRank | Whole) else node
    if is_stateful(node) or not (isinstance(node, Mapping) or (is_random and isinstance(node, list))):
        return
    if not is_random and not all(isinstance(key, str) for key in node):
        return
    yield path, (node, is_random)
    for key, item in _items(node):
        name = key.lower() if isinstance(key, str) else ""
        if not _SETTINGS.fullmatch(name):
            yield from _walk(item, (*path, key), is_random=is_random or bool(_RANDOM.fullmatch(name)))


def _items(node: Any) -> Iterable[tuple[Any, Any]]:
    return node.items() if isinstance(node, Mapping) else enumerate(node)


def _values(node: Any, is_random: bool, *, stands: bool) -> Iterator[tuple[Any, _Value]]:
    for key, item in _items(node):
        value = item.value if isinstance(item, PerRank | Whole) else item
        random = is_random or (isinstance(key, str) and _RANDOM.fullmatch(key.lower()) is not None)
        if random and _is_generator_state(value):
            # A tensor of inference mode has no version.
            counts = isinstance(value, torch.Tensor) and not value.is_inference()
            version = cast(torch.Tensor, value)._version if counts else None  # noqa: SLF001 — torch has no other name
            yield key, _Value(value, is_random=True, version=version, stands=stands)
        elif not is_random and isinstance(value, int | float | str | np.number):
            yield key, _Value(value, is_random=False, version=None, stands=stands)


def _is_generator_state(value: object) -> bool:
    return isinstance(value, tuple) or (isinstance(value, torch.Tensor) and value.dtype == torch.uint8)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_sure(name: Path, value: _Value) -> bool:
    """Return True if each step changes a value of this name."""
    return value.is_random or (
        _is_number(value.value) and _COUNTER.fullmatch(str(name[-1]).lower()) is not None
    )


def _is_same(name: Path, before: _Value, now: _Value) -> bool:
    if before.is_random or now.is_random:
        return now.value is before.value and now.version == before.version
    return bool(now.value == before.value) and (now.stands or _is_sure(name, now))


def _remember(node: Any) -> _Still:
    """Return what tells later whether that is the same dict.

    One with tensors isn't held, since it may have been built for the save and be very large. It counts as the same
    while it has the same tensors. One that gets keys is another one: it is a log, whose items stay as they are.
    """
    tensor, n_items = _first_tensor(node), len(node)
    if tensor is None:
        return lambda later: later is node and len(later) == n_items
    held = ref(tensor)
    return lambda later: held() is not None and _first_tensor(later) is held() and len(later) == n_items


def _first_tensor(node: Any) -> torch.Tensor | None:
    if isinstance(node, torch.Tensor):
        return node
    if isinstance(node, Mapping | list | tuple) and not is_stateful(node):
        items = node.values() if isinstance(node, Mapping) else node
        return next((found for item in items if (found := _first_tensor(item)) is not None), None)
    return None


def _describe(values: Mapping[Path, _Value], sure: set[Path], first: int, last: int) -> str:
    """Tell first of what is likely a mistake, then of the rest."""
    random = [join_path(name) for name, value in values.items() if value.is_random]
    counters = {name: value for name, value in values.items() if name in sure and not value.is_random}
    others = {name: value for name, value in values.items() if name not in sure}
    when = f"in the saves of step {first} to {last}"
    set_them = "set it before each save, or give a function that builds the state: manager.step(step, lambda: {...})."
    said = []
    if counters:
        said.append(
            f"{_list(counters)} in the state didn't change {when}, and a restart would find that. If it counts on, "
            f"{set_them} The restored step itself is in RestoreResult.step."
        )
    if random:
        said.append(
            f"{', '.join(random)} in the state is the same object {when}: it says where a generator was when the state "
            "was built, and nothing sets the generator after a restore. Put RandomState() in its place."
        )
    if others:
        said.append(
            f"{_list(others)} in the state didn't change {when}{' either' if said else ''}. That is right for a "
            f"constant, and for what hasn't changed in the training either. For anything else, {set_them} What stands "
            "in a dict named settings isn't told of."
        )
    return " ".join(said)


def _list(values: Mapping[Path, _Value]) -> str:
    named = [f"{join_path(name)} = {value.value!r}" for name, value in values.items()]
    more = [f"… ({len(named)})"] if len(named) > _SHOWN else []
    return ", ".join(named[:_SHOWN] + more)
