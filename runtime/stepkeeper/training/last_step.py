"""Remember the last finished step until it is saved: a training that ends well saves it."""

from stepkeeper.save.request import SaveRequest
from stepkeeper.save.watch.state_marks import StateMarks

__all__ = ["LastStep"]


class LastStep:
    """Hold the request of the last finished step, and notice if its state has changed since.

    The state is the training's own, and isn't copied. A step that was trained after it, but not finished, or weights
    that were loaded for an evaluation, would be saved under the wrong number. So some of the tensors are compared.
    """

    def __init__(self) -> None:
        self._request: SaveRequest | None = None
        self._marks: StateMarks | None = None

    @property
    def request(self) -> SaveRequest | None:
        """The last finished step, if nothing has saved it."""
        return self._request

    @property
    def has_changed(self) -> bool:
        """True if the state isn't that of the step any more."""
        if self._request is None or self._marks is None:
            return False
        return StateMarks.of(self._request.state).differ_from(self._marks)

    def note_finished(self, request: SaveRequest) -> None:
        """Note that `request` is the last step that was finished."""
        self._request, self._marks = request, StateMarks.of(request.state)

    def forget(self) -> None:
        """Forget the step: it is being saved, or another state was restored."""
        self._request, self._marks = None, None
