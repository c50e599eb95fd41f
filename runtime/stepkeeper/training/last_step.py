"""Remember the last finished step until it is saved. A training that ends well saves it."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import torch

from stepkeeper.save.given_state import GivenState, SaveRequest
from stepkeeper_planners.adapters.changes import ChangeMark, mark_changes
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import is_stateful
from stepkeeper_planners.state.whole import Whole

__all__ = ["LastStep"]

_MOST_TENSORS: Final = 16
"""The most tensors of a state that are compared."""

_VISITS: Final = 100
"""The most containers, objects and tensors of a state that are visited, and entries of a container."""

_HELD_BYTES: Final = 4 << 20
"""The size of the largest tensor that this module keeps alive from one save to the next."""

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})


class LastStep:
    """Hold the request of the last finished step, and detect changes of its state.

    The state is the training's own and isn't copied: an unfinished later step, or weights that were loaded for an
    evaluation, could be saved under the wrong number. So some tensors are marked at the end of a step, and compared
    with their marks before a save. A few must do, since the train loop waits for this at every step, and they are
    enough: an optimizer's step changes all tensors.
    """

    def __init__(self) -> None:
        self.request: SaveRequest | None = None
        """The last finished step, if nothing has saved it."""

        self._marks: list[ChangeMark] = []
        self._saved: tuple[SaveRequest | None, list[ChangeMark]] = None, []
        """The step and marks that the newest save has made this object forget."""

        self._read: Sequence[torch.Tensor] = ()
        """Some of the tensors that the last save read, for a state whose tensors can't be found."""

    @property
    def has_changed(self) -> bool:
        """True if the state has changed since the step."""
        if self.request is None:
            return False
        now = self._mark(self.request.state)
        return len(now) != len(self._marks) or any(
            mine.differs_from(then) for mine, then in zip(now, self._marks, strict=True)
        )

    def note_finished(self, request: SaveRequest) -> None:
        """Record that `request` is the last finished step."""
        self.request, self._marks = request, self._mark(request.state)

    def follow_save(self, request: SaveRequest) -> SaveRequest:
        """Forget the step if it is the one to save. Return a request that records the tensors it reads."""
        if self.request is not None and self.request.step != request.step:
            return request
        saved = self.request, self._marks
        self.forget()
        self._saved = saved
        # A state whose tensors can be found needs no record.
        if next(_find_tensors(request.state), None) is not None:
            return request
        return replace(request, on_tensors=self._note_tensors)

    def _note_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        small = [each for each in tensors.values() if each.numel() * each.itemsize <= _HELD_BYTES]
        self._read = _spread(small)

    def forget(self) -> None:
        """Forget the step: it is being saved, or another state was restored."""
        self.request, self._marks = self._saved = None, []

    def take_back(self) -> None:
        """Remember the step again that the newest save should have saved, unless a later one has been finished."""
        if self.request is None:
            self.request, self._marks = self._saved

    def _mark(self, state: GivenState) -> list[ChangeMark]:
        """Mark tensors of the state, or of the last save, without calling functions of the program."""
        tensors = list(islice(_find_tensors(state), _MOST_TENSORS))
        return list(map(mark_changes, tensors or self._read))


def _find_tensors(state: GivenState) -> Iterator[torch.Tensor]:
    """Yield tensors in the containers, modules and optimizers of a state, those near its top first."""
    queue: deque[Any] = deque([state])
    for _ in range(_VISITS):
        if not queue:
            return
        node = queue.popleft()
        if isinstance(node, torch.Tensor):
            yield node
        else:
            queue.extend(_list_parts(node))


def _list_parts(node: Any) -> Iterable[Any]:
    match node:
        case torch.nn.Module():
            return islice(node.parameters(), _MOST_TENSORS)
        case torch.optim.Optimizer():
            groups = [group["params"] for group in node.param_groups[:_MOST_TENSORS]]
            return [each for params in groups for each in (*params[:1], *params[-1:])]
        case PerRank() | Whole():
            return [node.value]
        case Mapping() if not is_stateful(node):
            return _spread(_without_scalars(node.values()))
        case list() | tuple():
            return _spread(_without_scalars(node))
        case _:
            return ()


def _without_scalars(items: Iterable[Any]) -> list[Any]:
    return [each for each in islice(items, _VISITS) if type(each) not in _SCALARS]


def _spread(items: list[Any]) -> list[Any]:
    """Return at most `_MOST_TENSORS` of the items, evenly spread."""
    stride = math.ceil(len(items) / _MOST_TENSORS) or 1
    return items[::stride]
