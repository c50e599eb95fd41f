"""Decide how a process of the training ends. Pure: no threads, files or clocks.

An `Ending` is the state of one rank. Its `move` is the next action of the rank's train thread. `shell.py` makes the
move, and passes the result to a method, which returns the next `Ending`. `tests/property/agreement_model` does so in
all interleavings of the ranks. The stop step is the step at which all ranks agreed to stop after a notice.

    Running → Stopping → Saved | GaveUp      all ranks reach a stop step, or a program ends itself after a notice
    Running → Done                           training is done
    any     → GaveUp                         an exception, a fence (another claim owns the root), a lost rank

Three methods begin an end. The moves that follow, until `move` is None again or all parts are closed:

    stop    SAVE_STOP, repeated while a retry may help; if the job saves nothing at a stop: MEET, SAVE_STOP
    leave   after a stop: SETTLE, CLOSE
            at a stop step where the program hasn't stopped: MEET, SAVE_STOP, CLOSE
            otherwise: AGREE, then SAVE_LAST or SAVE_STOP if the ranks choose so, CLOSE
    fail    SETTLE, CLOSE; only CLOSE after the loss of a rank

SAVE_STOP without the step's state saves nothing: it only waits for the newest save.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Self

from stepkeeper.contract import EndKind, ExitCode
from stepkeeper.ending.exits import exit_code_of
from stepkeeper.errors import PeerLostError

__all__ = ["Ending", "Move"]

_MOST_TRIES: Final = 3
"""How often the save of one step is tried. After the third failure, another try has little chance."""


class Move(Enum):
    """An action of the train thread on the way to its end. All ranks make the first four together."""

    MEET = "meet"
    """Wait until all ranks have reached the stop step."""

    SAVE_STOP = "save the stop step"
    """If the stop step's state is available, choose with all ranks whether to save it. Wait for the newest save."""

    AGREE = "agree"
    """Wait for the saves in flight, and agree with all ranks on the end."""

    SAVE_LAST = "save the last step"
    """Save the last finished step, and wait until all ranks have saved it, since their commit needs this rank."""

    SETTLE = "settle"
    """Wait for the saves in flight: those that the program began after its stop, or, after an exception, a short
    time."""

    CLOSE = "close"
    """Write the termination message, send the last report, and close all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The progress of one rank's process toward its end."""

    saves_at_stop: bool = True
    """False if a stop saves no step, as the job's setting Skip asks."""

    move: Move | None = None
    """The next move; None while the program's own code runs in the train thread."""

    stop_step: int | None = None
    """The agreed stop step, once this rank has reached it."""

    has_state: bool = False
    """True if the stop step's state is available, so that the step can be saved or retried."""

    n_tries: int = 0
    """The number of SAVE_STOP moves that have ended."""

    has_stopped: bool = False
    """True if nothing more is saved and the train loop should end."""

    is_leaving: bool = False
    """True if the program has ended or closes the manager: moves follow until all parts are closed."""

    ends_itself: bool = False
    """True if the program ended itself because of a notice."""

    loss: str | None = None
    """The reason that the last step isn't saved, for messages; None if it is, or there was nothing to save."""

    choice: str | None = None
    """The ranks' choice what to save, with the reason, for messages; None if there was no choice."""

    code: int | None = None
    """The intended exit code; None until it is known."""

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
        return replace(self, move=Move.SAVE_STOP if self.saves_at_stop else Move.MEET, has_state=True)

    def on_ranks_met(self) -> Self:
        """Continue after all ranks have reached the stop step, or one failed to."""
        return replace(self, move=Move.SAVE_STOP, has_state=False)

    def on_save_finished(
        self, loss: str | None, *, may_retry: bool = False, choice: str | None = None
    ) -> Self:
        """Continue after SAVE_STOP. `loss` is the reason that a save failed or wasn't started; None without one.

        `may_retry`: another try may avoid the failure. `choice` is the ranks' choice and its reason, for messages.
        """
        n_tries = self.n_tries + 1
        again = self.has_state and may_retry and n_tries < _MOST_TRIES
        after = replace(self, n_tries=n_tries, loss=loss, choice=choice or self.choice)
        return after if again else after.end_stop()

    def end_stop(self) -> Self:
        """Return to the train loop, which should end, or close if it has ended."""
        if self.is_leaving:
            return replace(self, move=Move.CLOSE, has_stopped=True, code=ExitCode.SAVED)
        return replace(self, move=None, has_stopped=True)

    def miss_deadline(self, loss: str) -> Self:
        """Stop here without a save: a notice's deadline has come."""
        return replace(self, move=None, has_stopped=True, loss=loss)

    def leave(self, *, ends_itself: bool = False, respects_stop: bool = True) -> Self:
        """End the process without an exception.

        `ends_itself`: the program ended itself after a notice. `respects_stop` is False if training counts as done even
        though the program reached a stop step without stopping.
        """
        leaving = replace(self, is_leaving=True, ends_itself=ends_itself)
        if self.has_stopped:
            return replace(leaving, move=Move.SETTLE)
        if respects_stop and self.stop_step is not None:
            # The program may have saved the stop step by itself. No rank may leave before the others have reached it.
            return replace(leaving, move=Move.MEET)
        return replace(leaving, move=Move.AGREE)

    def on_end_agreed(self, *, saves: bool, stops: bool, loss: str | None = None) -> Self:
        """Continue after all ranks have agreed on the end, as `EndChoice` has it."""
        if stops:
            return replace(self, move=Move.SAVE_STOP, has_state=saves, loss=loss)
        return replace(self, move=Move.SAVE_LAST) if saves else self.close_with(ExitCode.DONE)

    def close_with(self, code: int) -> Self:
        """Close all parts, and end the process with `code`."""
        return replace(self, move=Move.CLOSE, code=code)

    def fail(self, error: BaseException) -> Self:
        """End the process because of an exception. A save in flight gets time to finish if it needs no lost rank."""
        move = Move.CLOSE if isinstance(error, PeerLostError) else Move.SETTLE
        return replace(self, move=move, code=exit_code_of(error))

    def return_to_program(self) -> Self:
        """Return the thread to the program: a move raised an error. The program may handle it, and train on."""
        return replace(self, move=None, is_leaving=False, code=None)

    def on_closed(self) -> Self:
        """Finish after all parts are closed."""
        return replace(self, move=None, is_closed=True)
