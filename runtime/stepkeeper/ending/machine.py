"""Decide how a process of the training ends. Pure: no threads, files or clocks.

An `Ending` is one rank's. `move` is what its train thread does next; `shell.py` does it, and passes what came of it to
a method, which returns the next `Ending`. `tests/property/agreement_model` does so in all orders of all ranks.

    Running → Stopping → Saved | GaveUp      all ranks reach a stop step, or a program ends itself after a notice
    Running → Done                           training is done
    any     → GaveUp                         an exception, a fence, a lost rank
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Self

from stepkeeper.contract import EndKind, ExitCode
from stepkeeper.ending.exits import exit_code_of
from stepkeeper.errors import PeerLostError

__all__ = ["Ending", "Move"]

_MOST_TRIES: Final = 3
"""How often the save of one step is started: a third failure is no accident."""


class Move(Enum):
    """A step of the train thread towards its end. All ranks make the first four together."""

    MEET = "meet"
    """Wait for all ranks at the stop step, which is not saved here."""

    SAVE_STOP = "save the stop step"
    """Choose with all ranks whether to start a save of the stop step, and wait for the newest save."""

    AGREE = "agree"
    """Wait for the saves in flight, and agree with all ranks how they end."""

    SAVE_LAST = "save the last step"
    """Save the last finished step, and wait until all ranks have: until then they need this one for their commit."""

    SETTLE = "settle"
    """Wait for the saves in flight: for those that a program began after its stop; a little, after an exception."""

    CLOSE = "close"
    """Write the termination message, send the last report, and close all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of one rank's process, as far as it has come."""

    saves_at_stop: bool = True
    """False if a stop saves no step: the job says Skip."""

    move: Move | None = None
    """None while the process trains, or the program has the thread."""

    stop_step: int | None = None
    """The step at which all ranks have agreed to stop, once this rank has reached it."""

    has_state: bool = False
    """True if the stop step's state is there: it can be saved, again if that fails."""

    n_tries: int = 0
    """How often all ranks have chosen whether to save the stop step."""

    has_stopped: bool = False
    """True if nothing more is saved, and the train loop is to end."""

    is_leaving: bool = False
    """True if the program has ended, or closes the manager: all moves follow each other until all parts are closed."""

    ends_itself: bool = False
    """True if the program has ended itself because of a notice."""

    loss: str | None = None
    """Why the last step isn't saved, for people; None if it is, or there was nothing to save."""

    choice: str | None = None
    """What all ranks have chosen to save, and why, for people; None if there was no choice."""

    code: int | None = None
    """The exit code that is meant; None until it is known."""

    is_closed: bool = False

    def kind_of(self, code: int) -> EndKind:
        """Return the kind of an end with `code` as things are: Stopping, Saved or GaveUp if the process stops."""
        if code != ExitCode.SAVED:
            return EndKind.of(code)
        if self.has_stopped:
            return EndKind.SAVED if self.loss is None else EndKind.GAVE_UP
        return EndKind.STOPPING if self.code is None else EndKind.GAVE_UP

    def reach(self, step: int) -> Self:
        """Reach the step at which all ranks stop. `stop` follows, unless the program saves it by itself."""
        return self if self.stop_step is not None else replace(self, stop_step=step)

    def stop(self) -> Self:
        """Stop at the step that was reached, whose state is there."""
        return replace(self, move=Move.SAVE_STOP if self.saves_at_stop else Move.MEET, has_state=True)

    def hear_met(self) -> Self:
        """Hear that all ranks have reached the stop step; or that one doesn't."""
        return replace(self, move=Move.SAVE_STOP, has_state=False)

    def hear_save(self, loss: str | None, *, may_retry: bool = False, choice: str | None = None) -> Self:
        """Hear how the newest save has ended.

        Args:
            loss: Why it failed, or wasn't started; None if it is committed.
            may_retry: True if another try may avoid the failure.
            choice: What they have chosen, and why, for people.

        """
        n_tries = self.n_tries + 1
        again = self.has_state and may_retry and n_tries < _MOST_TRIES
        after = replace(self, n_tries=n_tries, loss=loss, choice=choice or self.choice)
        return after if again else after.end_stop()

    def end_stop(self) -> Self:
        """Return to the train loop, which is to end; or close, if it has ended."""
        if self.is_leaving:
            return replace(self, move=Move.CLOSE, has_stopped=True, code=ExitCode.SAVED)
        return replace(self, move=None, has_stopped=True)

    def miss_deadline(self, loss: str) -> Self:
        """Stop here, unsaved: the time of a notice is over."""
        return replace(self, move=None, has_stopped=True, loss=loss)

    def leave(self, *, ends_itself: bool = False, heeds_stop: bool = True) -> Self:
        """End the process in order.

        Args:
            ends_itself: True if the program has ended itself, and a notice had come.
            heeds_stop: False if training is done, though the program may have reached a stop step and not stopped.

        """
        leaving = replace(self, is_leaving=True, ends_itself=ends_itself)
        if self.has_stopped:
            return replace(leaving, move=Move.SETTLE)
        if heeds_stop and self.stop_step is not None:
            # The program has saved the stop step by itself, or not: no rank may leave before the others are there.
            return replace(leaving, move=Move.MEET)
        return replace(leaving, move=Move.AGREE)

    def hear_end(self, *, saves: bool, stops: bool, loss: str | None = None) -> Self:
        """Hear how all ranks end.

        Args:
            saves: True if they save the last finished step.
            stops: True if a program has ended itself because of a notice: training isn't done.
            loss: Why the last step isn't saved, for people.

        """
        if stops:
            return replace(self, move=Move.SAVE_STOP, has_state=saves, loss=loss)
        return replace(self, move=Move.SAVE_LAST) if saves else self.close_with(ExitCode.DONE)

    def close_with(self, code: int) -> Self:
        """Close all parts, and end the process with `code`."""
        return replace(self, move=Move.CLOSE, code=code)

    def fail(self, error: BaseException) -> Self:
        """End the process because of an exception. A save has time to settle if no rank that it needs is lost."""
        move = Move.CLOSE if isinstance(error, PeerLostError) else Move.SETTLE
        return replace(self, move=move, code=exit_code_of(error))

    def return_to_program(self) -> Self:
        """Give the thread back: a move has raised an error, which the program may handle."""
        return replace(self, move=None, is_leaving=False, code=None)

    def hear_closed(self) -> Self:
        """Hear that all parts are closed."""
        return replace(self, move=None, is_closed=True)
