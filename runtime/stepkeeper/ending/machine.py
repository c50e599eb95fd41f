"""Decide how a process of the training ends. Pure: no threads, files or clocks.

An `Ending` is the state of one rank. Its `move` is the next action of the rank's train thread. `shell.py` makes the
move, and passes the result to a method, which returns the next `Ending`. `tests/property/agreement_model` does so in
all interleavings of the ranks. The stop step is the step at which all ranks agreed to stop after a notice.

    Running → Stopping → Saved | GaveUp      all ranks reach a stop step, or a program ends itself after a notice
    Running → Done                           training is done
    any     → GaveUp                         an exception, a fence (another claim owns the root), a lost rank

Three methods begin an end. The moves that follow, until `move` is None again or all parts are closed:

    stop        SAVE_STOP, repeated while a retry may help; MEET if the job saves nothing at a stop
    leave       after a stop: CLOSE
                at a stop step where the program hasn't stopped: MEET, CLOSE
                otherwise: AGREE, then SAVE_LAST, SAVE_STOP or MEET if the ranks choose so, CLOSE
    close_with  CLOSE, after an exception
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple, Self

from stepkeeper.contract import EndKind, ExitCode

__all__ = ["EndChoice", "Ending", "Move", "choose_end"]

_MOST_TRIES: Final = 3
"""How often the save of one step is tried. After the third failure, another try has little chance."""


class EndChoice(NamedTuple):
    """The choice of one rank, or of all ranks together, at the training's end."""

    step: int | None
    """The last finished step, if it isn't saved; None if there is nothing to save."""

    stops: bool
    """True if the program ended itself because of a notice: training isn't done."""

    loss: str | None = None
    """Why `step` isn't to be saved, for messages; None otherwise."""


def choose_end(ends: Sequence[EndChoice]) -> EndChoice:
    """Join the choices of all ranks. A save needs all of them at one step, each with the state that the step left."""
    loss = next((end.loss for end in ends if end.loss is not None), None)
    steps = sorted({end.step for end in ends if end.step is not None})
    if len(steps) > 1 or (steps and any(end.step is None for end in ends)):
        loss = (
            "the last step is not saved: the ranks end at different steps (unsaved: "
            f"{', '.join(map(str, steps))}). The next start resumes from the newest commit"
        )
    return EndChoice(ends[0].step, any(end.stops for end in ends), loss)


class Move(Enum):
    """An action of the train thread on the way to its end."""

    MEET = "meet"
    """Wait until all ranks have reached the stop step, and for the newest save. All ranks do so together."""

    SAVE_STOP = "save the stop step"
    """Save the stop step after the saves in flight, unless it is committed. All ranks do so together."""

    AGREE = "agree"
    """Wait for the saves in flight, and agree with all ranks on the end."""

    SAVE_LAST = "save the last step"
    """Save the last finished step, and wait until all ranks have saved it, since their commit needs this rank."""

    CLOSE = "close"
    """Wait for the saves in flight, write the termination message, send the last report, and close all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The progress of one rank's process toward its end."""

    saves_at_stop: bool = True
    """False if a stop saves no step, as the job's setting Skip asks."""

    move: Move | None = None
    """The next move; None while the program's own code runs in the train thread."""

    stop_step: int | None = None
    """The agreed stop step, once this rank has reached it."""

    n_tries: int = 0
    """The number of SAVE_STOP moves that have ended."""

    has_stopped: bool = False
    """True if nothing more is saved and the train loop should end."""

    is_leaving: bool = False
    """True if the program has ended or closes the manager: moves follow until all parts are closed."""

    loss: str | None = None
    """The reason that the last step isn't saved, for messages; None if it is, or there was nothing to save."""

    code: int | None = None
    """The intended exit code; None until it is known. In AGREE it is known if the program ended itself after a notice.
    """

    is_closed: bool = False

    def kind_of(self, code: int) -> EndKind:
        """Return the kind of an end with `code` in this state: Stopping, Saved or GaveUp if the process stops."""
        if code != ExitCode.SAVED:
            return EndKind.of(code)
        if self.has_stopped:
            return EndKind.SAVED if self.loss is None else EndKind.GAVE_UP
        # Without a stop this is the code of a notice's deadline, which ends the process or may do so.
        return EndKind.STOPPING if self.code is None else EndKind.GAVE_UP

    def reach(self, step: int) -> Self:
        """Reach the stop step. `stop` follows, unless the program saves the step by itself."""
        return self if self.stop_step is not None else replace(self, stop_step=step)

    def stop(self) -> Self:
        """Stop at the reached step, whose state is available."""
        return replace(self, move=Move.SAVE_STOP if self.saves_at_stop else Move.MEET)

    def on_stop_tried(self, loss: str | None, *, may_retry: bool = False) -> Self:
        """Continue after a try to stop: return to the train loop, which should end, or close if it has ended.

        `loss` is the reason that the last step isn't saved; None without one. `may_retry`: another SAVE_STOP may avoid
        it.
        """
        saves = self.move is Move.SAVE_STOP
        # A meeting of the ranks doesn't make up for a step that they can't save.
        after = replace(self, n_tries=self.n_tries + saves, loss=loss if saves else self.loss or loss)
        if saves and may_retry and after.n_tries < _MOST_TRIES:
            return after
        after = replace(after, move=None, has_stopped=True)
        return after.close_with(ExitCode.SAVED) if self.is_leaving else after

    def leave(self, *, ends_itself: bool = False, respects_stop: bool = True) -> Self:
        """End the process without an exception.

        `ends_itself`: the program ended itself after a notice. `respects_stop` is False if training counts as done even
        though the program reached a stop step without stopping.
        """
        leaving = replace(self, is_leaving=True)
        if self.has_stopped:
            return leaving.close_with(ExitCode.SAVED)
        if respects_stop and self.stop_step is not None:
            # The program may have saved the stop step by itself. No rank may leave before the others have reached it.
            return replace(leaving, move=Move.MEET)
        return replace(leaving, move=Move.AGREE, code=ExitCode.SAVED if ends_itself else None)

    def on_end_agreed(self, choice: EndChoice) -> Self:
        """Continue after all ranks have agreed on the end."""
        saves = choice.step is not None and choice.loss is None
        if choice.stops:
            return replace(self, move=Move.SAVE_STOP if saves else Move.MEET, loss=choice.loss)
        return replace(self, move=Move.SAVE_LAST) if saves else self.close_with(ExitCode.DONE)

    def close_with(self, code: int) -> Self:
        """Close all parts, and end the process with `code`."""
        return replace(self, move=Move.CLOSE, code=code)

    def return_to_program(self) -> Self:
        """Return the thread to the program: a move raised an error. The program may handle it, and train on."""
        return replace(self, move=None, is_leaving=False, code=None)

    def on_closed(self) -> Self:
        """Finish after all parts are closed."""
        return replace(self, move=None, is_closed=True)
