"""Remember the last finished step until it is saved: a training that ends well saves it."""

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
"""So many tensors of a state are compared."""

_VISITS: Final = 100
"""So many containers, objects and tensors of a state are looked at."""

_ENTRIES: Final = 200
"""So many entries of a container are looked through."""

_PARAMETERS: Final = 4
"""So many parameters of a module, and groups of an optimizer, are compared."""

_HELD_BYTES: Final = 4 << 20
"""A tensor that a save has read is held until the next one if it has at most so many bytes."""

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})


class LastStep:
    """Hold the request of the last finished step, and notice if its state has changed since.

    The state is the training's own, and isn't copied. A step that was trained after it, but not finished, or weights
    that were loaded for an evaluation, would be saved under the wrong number. So some of the tensors are compared:
    the train loop waits for this at every step, and an optimizer's step changes all that it trains.
    """

    def __init__(self) -> None:
        self._request: SaveRequest | None = None
        self._marks: list[ChangeMark] = []
        self._read: Sequence[torch.Tensor] = ()
        """Some of the tensors that the last save has read, of a state in which none can be seen."""

    @property
    def request(self) -> SaveRequest | None:
        """The last finished step, if nothing has saved it."""
        return self._request

    @property
    def has_changed(self) -> bool:
        """True if the state isn't that of the step any more."""
        if self._request is None:
            return False
        now = self._mark(self._request.state)
        return len(now) != len(self._marks) or any(
            mine.differs_from(then) for mine, then in zip(now, self._marks, strict=True)
        )

    def note_finished(self, request: SaveRequest) -> None:
        """Note that `request` is the last step that was finished."""
        self._request, self._marks = request, self._mark(request.state)

    def follow_save(self, request: SaveRequest) -> SaveRequest:
        """Forget the step, if it is the one to save, and return the request of a save, which notes what it reads."""
        if self._request is not None and self._request.step != request.step:
            return request
        self.forget()
        if next(_find_tensors(request.state), None) is not None:
            return request
        return replace(request, on_tensors=self._note_tensors)

    def _note_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        small = [each for each in tensors.values() if each.numel() * each.itemsize <= _HELD_BYTES]
        self._read = _spread(small)

    def forget(self) -> None:
        """Forget the step: it is being saved, or another state was restored."""
        self._request, self._marks = None, []

    def _mark(self, state: GivenState) -> list[ChangeMark]:
        """Mark tensors of the state, without calling anything; those that it had last, where none can be seen."""
        tensors = list(islice(_find_tensors(state), _MOST_TENSORS))
        return list(map(mark_changes, tensors or self._read))


def _find_tensors(state: GivenState) -> Iterator[torch.Tensor]:
    """Yield tensors in the containers, modules and optimizers of a state. What is near its top comes first."""
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
            return islice(node.parameters(), _PARAMETERS)
        case torch.optim.Optimizer():
            groups = [group["params"] for group in node.param_groups[:_PARAMETERS]]
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
    return [each for each in islice(items, _ENTRIES) if type(each) not in _SCALARS]


def _spread(items: list[Any]) -> list[Any]:
    """Return so many of the items as are compared, evenly spread."""
    return items[:: -(-len(items) // _MOST_TENSORS) or 1]
