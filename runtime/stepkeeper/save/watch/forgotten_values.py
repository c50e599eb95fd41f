"""Notice numbers in a state that was built once, before the training, and is saved as it was ever since."""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from stepkeeper.save.watch.stale_values import is_counter
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import Path, is_stateful, join_path
from stepkeeper_planners.state.whole import Whole

__all__ = ["Forgotten", "ForgottenValues"]

_SAVES: Final = 5
"""So many saves of different steps have to be alike: more than of a number that by its name each step changes."""

_MANY_SAVES: Final = 20
"""The same for numbers that may well be slow, such as an epoch, or constants. They are no reason for a warning."""

_WORK: Final = re.compile(
    r"(batches|bytes|characters|documents|examples|frames|images|iterations|iters|minibatches|records|"
    r"rows|samples|sequences|steps|tokens|transitions|updates|words)(_(count|counter|so_far|total))?"
)
"""Names of numbers that a training of any kind counts on at each step. 0 of them means that nobody does."""

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
        "phase",
        "precision",
        "prob",
        "rank",
        "rate",
        "reg",
        "run",
        "scale",
        "schema",
        "seed",
        "shard",
        "size",
        "smoothing",
        "split",
        "stage",
        "std",
        "task",
        "temperature",
        "threshold",
        "tol",
        "tolerance",
        "total",
        "trial",
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


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A message to the user, of numbers that stay the same."""

    level: int
    """The level to log it at: a warning only where no training that is in order has such a number."""

    text: str


class ForgottenValues:
    """Watch the first saves of a state that is one and the same dict, until a number in it changes.

    A dict that is built for each save has the numbers of that moment. One that is built once has those of the start,
    unless the training sets them. If none is set, one that is where a counter begins may be forgotten: 0, or the
    infinity that a least loss begins with, or an epoch. A count of work, by its name, is a mistake. Anything
    else may be slow, or a constant. `StaleValues` tells of what counts by its name, whatever it is.
    Nothing is held of a state with tensors in its dicts: it is mostly built for each save, and may be very large.
    """

    def __init__(self) -> None:
        self._done = False
        self._dicts: list[Any] = []
        self._plain: dict[Path, object] = {}
        self._steps: list[int] = []

    def find_forgotten(self, step: int, state: Mapping[str, object]) -> Forgotten | None:
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
        counts = [name for name in forgotten if _WORK.fullmatch(str(name[-1]).lower())]
        if len(self._steps) < (_SAVES if counts else _MANY_SAVES):
            return None
        first = self._steps[0]
        self._stop()
        return _describe(
            {join_path(name): plain[name] for name in counts or forgotten},
            first,
            step,
            are_counts=bool(counts),
        )

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


def _describe(values: Mapping[str, object], first: int, last: int, *, are_counts: bool) -> Forgotten:
    listed = ", ".join(f"{name} = {value}" for name, value in values.items())
    advice = (
        "set before each save, or give a function that builds the state: manager.step(step, lambda: {...})."
    )
    if are_counts:
        return Forgotten(
            logging.WARNING,
            f"no number in the state has changed in the saves of step {first} to {last} ({listed}), and a restart "
            f"would find these. What counts on is to be {advice} A constant is better kept elsewhere, or in a dict "
            "named settings.",
        )
    return Forgotten(
        logging.INFO,
        f"no number in the state has changed in the saves of step {first} to {last} ({listed}). That is as it should "
        f"be for constants, and for what hasn't changed in the training either. Anything else is to be {advice}",
    )
