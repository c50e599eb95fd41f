"""Remember the last finished step until it is saved: a training that ends well saves it."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepkeeper.save.request import SaveRequest
from stepkeeper.save.watch.state_marks import StateMarks

__all__ = ["EndOfRank", "LastStep", "judge_last_step"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfRank:
    """The last step of one rank, at the training's end."""

    step: int | None
    """The last finished step, if it isn't saved; None if there is nothing to save."""

    changed: bool
    """True if the state isn't that of the step any more."""

    stops: bool = False
    """True if the program has ended itself because of a notice: training isn't done."""


def judge_last_step(ends: Sequence[EndOfRank]) -> tuple[bool, str | None]:
    """Decide whether all ranks save their last step.

    Returns:
        Whether they do, and what to tell the user if that is a surprise.

    """
    steps = sorted({end.step for end in ends if end.step is not None})
    if not steps:
        return False, None
    if len(steps) > 1 or any(end.step is None for end in ends):
        listed = ", ".join(map(str, steps))
        return False, (
            f"the last step isn't saved: the ranks don't end at the same one (unsaved: {listed}). What the newest "
            "commit has is what the next start goes on from"
        )
    if any(end.changed for end in ends):
        return False, (
            f"step {steps[0]}, the last one, isn't saved: the state has changed since. Call step() after the last "
            "change of each step, or save the last step where it is finished (total_steps=)"
        )
    return True, None
