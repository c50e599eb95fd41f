"""Remember the last finished step until it is saved. A training that ends well saves it."""

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
"""Number of a state's tensors that are compared."""

_VISITS: Final = 100
"""Number of a state's containers, objects and tensors that are visited."""

_ENTRIES: Final = 200
"""Number of a container's entries that are visited."""

_PARAMETERS: Final = 4
"""Number of a module's parameters, and of an optimizer's groups, that are compared."""

_HELD_BYTES: Final = 4 << 20
"""The largest tensor, in bytes, that is held from one save to the next."""

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})


class LastStep:
    """Hold the request of the last finished step, and detect changes of its state.

    The state is the training's own and isn't copied. An unfinished later step, or weights that were loaded for an
    evaluation, would be saved under the wrong number. So some of the tensors are compared. A few are enough, as an
    optimizer's step changes all of them, and the train loop waits for this at every step.
    """

    def __init__(self) -> None:
        self._request: SaveRequest | None = None
        self._marks: list[ChangeMark] = []
        self._read: Sequence[torch.Tensor] = ()
        """Some of the tensors that the last save read, for a state whose tensors can't be found."""

    @property
    def request(self) -> SaveRequest | None:
        """The last finished step, if nothing has saved it."""
        return self._request

    @property
    def has_changed(self) -> bool:
        """True if the state has changed since the step."""
        if self._request is None:
            return False
        now = self._mark(self._request.state)
        return len(now) != len(self._marks) or any(
            mine.differs_from(then) for mine, then in zip(now, self._marks, strict=True)
        )

    def note_finished(self, request: SaveRequest) -> None:
        """Record that `request` is the last finished step."""
        self._request, self._marks = request, self._mark(request.state)

    def follow_save(self, request: SaveRequest) -> SaveRequest:
        """Forget the step if it is the one to save. Return a request that records the tensors it reads."""
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
    """Return the items to compare, evenly spread."""
    return items[:: -(-len(items) // _MOST_TENSORS) or 1]
