"""Decide each rank's next move, so that all ranks act on a wish after the same step. Pure.

A wish is a request by name: to stop, or to save. A rank passes a step when its train loop has finished that step. A
round is about one wish:

1. A rank with a wish opens the round. Every rank then holds its train thread: it may not pass a step.
2. Every rank publishes the last step that it has passed.
3. Rank 0 publishes the latest of these steps, and every rank releases its thread.

No rank has passed a later step, so the wish is due at the first step after it. This holds for any interleaving and any
step numbers, even if training returns to an earlier commit. `StepAgreement` applies these rules to the ranks' store,
and `tests/property/agreement_model` to all interleavings.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple, Self, TypeAlias

__all__ = [
    "STOP",
    "STOPS",
    "STOP_ASKED",
    "Agreed",
    "Answer",
    "Await",
    "Conclude",
    "Listen",
    "Move",
    "Open",
    "Position",
    "RankView",
    "kills_for",
]

STOP: Final = "stop"
STOP_ASKED: Final = "stop/asked"
"""A stop by the program or the operator, after which no process is killed."""

STOPS: Final = (STOP, STOP_ASKED)


def kills_for(stops: Collection[str | None]) -> bool | None:
    """Return whether a process is killed after one of `stops`; None if there is no stop among them."""
    return True if STOP in stops else False if STOP_ASKED in stops else None


class Position(NamedTuple):
    """A place in the sequence of passed steps, which is the same in all ranks. Later positions compare greater."""

    n_returns: int
    """How often training had returned to a lower step before."""

    step: int

    def move_to(self, step: int) -> Self:
        """Return the position of `step`, the next step that is passed."""
        return self._replace(n_returns=self.n_returns + (step < self.step), step=step)


_BEFORE_ANY_STEP: Final = Position(0, -1)


class Agreed(NamedTuple):
    """A wish that all ranks have agreed on."""

    name: str
    beyond: Position
    """The wish is due at the first step after this one."""


class Listen(NamedTuple):
    """Check once whether a rank has opened this round."""

    number: int


class Open(NamedTuple):
    """Open this round for a wish, unless another rank has opened it, and read which wish it is about."""

    number: int
    name: str


class Answer(NamedTuple):
    """Send rank 0 the last step that this rank has passed. Rank 0 waits for the answers of all ranks."""

    number: int
    passed: Position


class Conclude(NamedTuple):
    """Send all ranks the latest step that any rank has passed. Only rank 0 does this."""

    number: int
    beyond: Position


class Await(NamedTuple):
    """Wait for the step that rank 0 sends."""

    number: int


Move: TypeAlias = Listen | Open | Answer | Conclude | Await


class _Stage(Enum):
    """A rank's progress in a round: no round is open, the train thread is held, its last step is sent."""

    LISTENING = "listening"
    HELD = "held"
    ANSWERED = "answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """The agreement as one rank sees it. Methods return the rank's next view, or its next move."""

    rank: int
    wishes: tuple[str, ...] = ()
    """Wishes of this rank that wait for a round."""

    agreed: tuple[Agreed, ...] = ()
    """Agreed wishes that are due at a step that this rank hasn't reached.

    The same wish may be here twice: a rank that is ahead may repeat it before this one has reached the first.
    """

    passed: Position = _BEFORE_ANY_STEP
    n_rounds: int = 0
    """The number of rounds that this rank has finished."""

    stage: _Stage = _Stage.LISTENING
    name: str = ""
    """The wish of the present round."""

    beyond: Position = _BEFORE_ANY_STEP
    """In rank 0, the latest step that any rank had passed when the present round began."""

    @property
    def is_held(self) -> bool:
        """True while the train thread may not pass a step."""
        return self.stage is not _Stage.LISTENING

    @property
    def agreed_stop(self) -> str | None:
        """STOP or STOP_ASKED if all ranks have agreed on a stop step that this rank hasn't reached."""
        names = {agreed.name for agreed in self.agreed}
        return next((stop for stop in STOPS if stop in names), None)

    def wish(self, name: str) -> Self:
        """Record a wish of this rank. A wish that is already recorded or agreed on isn't repeated."""
        if name in self.wishes or any(agreed.name == name for agreed in self.agreed):
            return self
        return replace(self, wishes=(*self.wishes, name))

    def agree_alone(self) -> Self:
        """Agree on this rank's wishes at once, as the only rank. They are due at its next step."""
        agreed = tuple(Agreed(name, _BEFORE_ANY_STEP) for name in self.wishes)
        return replace(self, wishes=(), agreed=self.agreed + agreed)

    def pass_step(self, step: int) -> tuple[Self, tuple[str, ...]]:
        """Pass `step`, which a held rank never does. Return the next view, and the wishes that are due."""
        passed = self.passed.move_to(step)
        due = tuple(agreed.name for agreed in self.agreed if passed > agreed.beyond)
        later = tuple(agreed for agreed in self.agreed if passed <= agreed.beyond)
        return replace(self, passed=passed, agreed=later), due

    def next_move(self) -> Move:
        """Return this rank's next move."""
        match self.stage:
            case _Stage.HELD:
                return Answer(self.n_rounds, self.passed)
            case _Stage.ANSWERED:
                return Conclude(self.n_rounds, self.beyond) if self.rank == 0 else Await(self.n_rounds)
            case _ if self.wishes:
                return Open(self.n_rounds, self.wishes[0])
            case _:
                return Listen(self.n_rounds)

    def receive_wish(self, name: str | None) -> Self:
        """Receive the round's wish, after Listen or Open. None: no rank has opened the round."""
        return self if name is None else replace(self, stage=_Stage.HELD, name=name)

    def receive_answers(self, passed: tuple[Position, ...]) -> Self:
        """Receive the steps that all ranks have passed, after Answer. Ranks other than 0 receive none."""
        return replace(self, stage=_Stage.ANSWERED, beyond=max(passed, default=_BEFORE_ANY_STEP))

    def receive_conclusion(self, beyond: Position) -> Self:
        """Receive the round's result, after Conclude or Await, and release the train thread."""
        return replace(
            self,
            agreed=(*self.agreed, Agreed(self.name, beyond)),
            wishes=tuple(wish for wish in self.wishes if wish != self.name),
            n_rounds=self.n_rounds + 1,
            stage=_Stage.LISTENING,
        )
