"""Say what one rank does next so that all ranks act on a wish after the same step. Pure: no store, threads or clocks.

`StepAgreement` carries the rules out against the ranks' store. Whoever explores all interleavings of the ranks
(`tests/property/agreement_model`) carries out the same rules.

A round is about one wish. Each rank holds its train thread, tells which step it has passed, and lets the train thread
go on once rank 0 has told the latest of these steps. No rank has passed a step beyond that one, so the wish is due at
the first step beyond it: that is right for any interleaving, and for any step numbers, also for those that begin anew
when the training goes back to an earlier commit.
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
"""A stop that nobody kills a process for: the program, or the operator, asks for it."""

STOPS: Final = (STOP, STOP_ASKED)


def kills_for(stops: Collection[str | None]) -> bool | None:
    """Return True if a process is killed for one of `stops`; None if there is no stop among them."""
    return True if STOP in stops else False if STOP_ASKED in stops else None


class Position(NamedTuple):
    """A place in the sequence of steps, which is the same in all ranks."""

    n_returns: int
    """How often the training has gone back to a lower step until then."""

    step: int

    def follow_by(self, step: int) -> Self:
        """Return the position of the step that is passed after this one."""
        return self._replace(n_returns=self.n_returns + (step < self.step), step=step)


_BEFORE_ANY_STEP: Final = Position(0, -1)


class Agreed(NamedTuple):
    """A wish that all ranks have agreed on."""

    name: str
    beyond: Position
    """The wish is due at the first step beyond this one."""


class Listen(NamedTuple):
    """Look once whether a rank has opened this round."""

    number: int


class Open(NamedTuple):
    """Open this round for a wish, unless another rank has opened it already; then look what it is about."""

    number: int
    name: str


class Answer(NamedTuple):
    """Tell rank 0 which step this rank has passed. Rank 0 waits for the answers of all ranks."""

    number: int
    passed: Position


class Conclude(NamedTuple):
    """Tell all ranks the latest step that one has passed. Rank 0 alone does this."""

    number: int
    beyond: Position


class Await(NamedTuple):
    """Wait for the step that rank 0 concludes."""

    number: int


Move: TypeAlias = Listen | Open | Answer | Conclude | Await


class _Stage(Enum):
    LISTENING = "listening"
    HELD = "held"
    ANSWERED = "answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """The agreement as one rank sees it. Each method returns the rank's next view, or says what it does."""

    rank: int
    wishes: tuple[str, ...] = ()
    """Wishes that came up in this rank and that no round was about yet."""

    agreed: tuple[Agreed, ...] = ()
    """What is due at a step that this rank hasn't come to.

    A sequence, not a set: a rank that is ahead may wish the same again before this one has come to the first.
    """

    passed: Position = _BEFORE_ANY_STEP
    n_rounds: int = 0
    """The number of rounds that this rank has been through."""

    stage: _Stage = _Stage.LISTENING
    name: str = ""
    """The wish that the present round is about."""

    beyond: Position = _BEFORE_ANY_STEP
    """In rank 0, the latest step that a rank has passed when the present round began."""

    @property
    def is_held(self) -> bool:
        """True while the train thread may not pass a step."""
        return self.stage is not _Stage.LISTENING

    @property
    def agreed_stop(self) -> str | None:
        """STOP or STOP_ASKED if all ranks have agreed on a step to stop at, and this rank hasn't come to it yet."""
        names = {agreed.name for agreed in self.agreed}
        return next((stop for stop in STOPS if stop in names), None)

    def wish(self, name: str) -> Self:
        """Note a wish of this rank. One that is noted or agreed on already is the same wish."""
        if name in self.wishes or any(agreed.name == name for agreed in self.agreed):
            return self
        return replace(self, wishes=(*self.wishes, name))

    def agree_alone(self) -> Self:
        """Agree on this rank's wishes at once: there is no other rank."""
        agreed = tuple(Agreed(name, _BEFORE_ANY_STEP) for name in self.wishes)
        return replace(self, wishes=(), agreed=self.agreed + agreed)

    def pass_step(self, step: int) -> tuple[Self, tuple[str, ...]]:
        """Pass `step`; no rank does this while it is held.

        Returns:
            The next view, and the wishes that are due at this step.

        """
        passed = self.passed.follow_by(step)
        due = tuple(agreed.name for agreed in self.agreed if passed > agreed.beyond)
        later = tuple(agreed for agreed in self.agreed if passed <= agreed.beyond)
        return replace(self, passed=passed, agreed=later), due

    def next_move(self) -> Move:
        """Return what this rank does next."""
        match self.stage:
            case _Stage.HELD:
                return Answer(self.n_rounds, self.passed)
            case _Stage.ANSWERED:
                return Conclude(self.n_rounds, self.beyond) if self.rank == 0 else Await(self.n_rounds)
            case _ if self.wishes:
                return Open(self.n_rounds, self.wishes[0])
            case _:
                return Listen(self.n_rounds)

    def hear_wish(self, name: str | None) -> Self:
        """Take over what a round is about, after Listen or Open. None: no rank has opened it."""
        return self if name is None else replace(self, stage=_Stage.HELD, name=name)

    def hear_answers(self, passed: tuple[Position, ...]) -> Self:
        """Take over the steps that all ranks have passed, after Answer. Ranks other than 0 hear of none."""
        return replace(self, stage=_Stage.ANSWERED, beyond=max(passed, default=_BEFORE_ANY_STEP))

    def hear_conclusion(self, beyond: Position) -> Self:
        """Take over what the round has led to, after Conclude or Await, and let the train thread go on."""
        return replace(
            self,
            agreed=(*self.agreed, Agreed(self.name, beyond)),
            wishes=tuple(wish for wish in self.wishes if wish != self.name),
            n_rounds=self.n_rounds + 1,
            stage=_Stage.LISTENING,
        )
