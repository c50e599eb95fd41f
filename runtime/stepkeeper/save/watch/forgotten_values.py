"""Notice numbers in a state that was built once, before the training, and is saved as it was ever since."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from stepkeeper.save.watch.stale_values import is_counter
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import Path, is_stateful, join_path
from stepkeeper_planners.state.whole import Whole

__all__ = ["ForgottenValues"]

_SAVES: Final = 5
"""So many saves of different steps have to be alike: more than of a number that by its name each step changes."""

_EPOCH: Final = re.compile(r"((current|cur|train|training)_)?epoch(_(num|number|idx|index|count))?")

_CONSTANT: Final = frozenset(
    [
        "alpha",
        "batch",
        "beta",
        "bias",
        "clip",
        "coef",
        "coefficient",
        "debug",
        "decay",
        "delay",
        "delta",
        "device",
        "dropout",
        "eps",
        "epsilon",
        "every",
        "factor",
        "fold",
        "freq",
        "gamma",
        "gpu",
        "hidden",
        "id",
        "interval",
        "label",
        "lambda",
        "layers",
        "length",
        "level",
        "limit",
        "local",
        "lr",
        "margin",
        "max",
        "min",
        "momentum",
        "n",
        "nesterov",
        "node",
        "noise",
        "num",
        "pad",
        "padding",
        "penalty",
        "per",
        "precision",
        "prob",
        "rank",
        "rate",
        "reg",
        "scale",
        "schema",
        "seed",
        "shard",
        "size",
        "smoothing",
        "split",
        "std",
        "temperature",
        "threshold",
        "tol",
        "tolerance",
        "total",
        "verbose",
        "version",
        "vocab",
        "warmup",
        "weight",
        "workers",
        "world",
    ]
)
"""Words in the names of numbers that a training never changes, and that may well be 0."""

_SETTINGS: Final = re.compile(
    r"(.*_)?(args?|arguments|cfg|config|configuration|defaults|hparams|hyper_?param(eter)?s|kwargs|meta|metadata|options|"
    r"params|parameters|settings)"
)
"""Names of dicts that hold what a training was configured with."""


class ForgottenValues:
    """Watch the first saves of a state that is one and the same dict, until a number in it changes.

    A dict that is built for each save has the numbers of that moment. One that is built once has those of the start,
    unless the training sets them. If none is set, one that is where a counter begins is likely forgotten: 0, or the
    infinity that a least loss begins with, or an epoch. `StaleValues` tells of what counts by its name. Nothing is held
    of a state with tensors in its dicts: it is mostly built for each save, and may be very large.
    """

    def __init__(self) -> None:
        self._done = False
        self._dicts: list[Any] = []
        self._plain: dict[Path, object] = {}
        self._steps: list[int] = []

    def find_forgotten(self, step: int, state: Mapping[str, object]) -> str | None:
        """Compare `state` with the saves before this one.

        Returns:
            What to tell the user; None if there is nothing to tell, or it was told before.

        """
        if self._done or (self._steps and step <= self._steps[-1]):
            return None
        dicts = list(_walk(state, ()))
        plain = {
            (*path, key): value for path, each in dicts for key, value in each.items() if _is_plain(value)
        }
        forgotten = [name for name, value in plain.items() if _is_beginning(name, value)]
        held = [each for _, each in dicts]
        is_same = not self._steps or (
            len(held) == len(self._dicts)
            and all(now is then for now, then in zip(held, self._dicts, strict=True))
            and plain == self._plain
        )
        if not forgotten or not is_same or any(map(_has_tensors, held)):
            self._stop()
            return None
        self._dicts, self._plain = held, plain
        self._steps.append(step)
        if len(self._steps) < _SAVES:
            return None
        first = self._steps[0]
        self._stop()
        return _describe({join_path(name): plain[name] for name in forgotten}, first, step)

    def _stop(self) -> None:
        """Let go of the state, for good."""
        self._done = True
        self._dicts, self._plain, self._steps = [], {}, []


def _walk(node: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, object]]]:
    """Walk through the training's own dicts, but not through those of settings, nor through what numbers name."""
    node = node.value if isinstance(node, PerRank | Whole) else node
    if not isinstance(node, Mapping) or is_stateful(node) or not all(isinstance(key, str) for key in node):
        return
    yield path, node
    for key, item in node.items():
        if not _SETTINGS.fullmatch(key.lower()):
            yield from _walk(item, (*path, key))


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | np.number)


def _has_tensors(node: Mapping[str, object]) -> bool:
    """Tell whether there are tensors in a dict, or in a list or settings in it."""
    for item in node.values():
        if isinstance(item, torch.Tensor):
            return True
        if isinstance(item, list | tuple) and any(
            isinstance(each, torch.Tensor | Mapping | list) for each in item
        ):
            return True
    return False


def _is_beginning(name: Path, value: object) -> bool:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool) or is_counter(name[-1]):
        return False
    last = str(name[-1]).lower()
    if _EPOCH.fullmatch(last):
        return True
    return bool(value == 0 or math.isinf(value)) and _CONSTANT.isdisjoint(re.split(r"[_\d]+", last))


def _describe(forgotten: Mapping[str, object], first: int, last: int) -> str:
    listed = ", ".join(f"{name} = {value}" for name, value in forgotten.items())
    return (
        f"no number in the state has changed in the saves of step {first} to {last} ({listed}), and a restart would "
        "find these. What counts on is to be set before each save, or give a function that builds the state: "
        "manager.step(step, lambda: {...}). A constant is better kept elsewhere, or in a dict named settings."
    )
