"""Ranks that train, agree and end, one action at a time.

What a rank does for the agreement is the shipped `RankView`'s, and how it ends the shipped `Ending`'s. Here is only
what surrounds them: the ranks' store, which is in rank 0; the steps that the train threads pass; notices and other
wishes that come up at any moment; saves that fail; and ranks that are lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from stepkeeper.contract import ExitCode
from stepkeeper.coordination.agreement_rules import (
    STOPS,
    Answer,
    Await,
    Conclude,
    Listen,
    Open,
    Position,
    RankView,
)
from stepkeeper.ending.machine import EndChoice, Ending, Move, choose_end


class Fate(Enum):
    TRAINING = "training"
    ENDING = "ending"
    """It makes the moves of its `Ending`."""

    LEFT = "left"
    GAVE_UP = "gave up"
    """It ended with the error of a lost rank."""

    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is explored."""

    steps: tuple[int, ...]
    """The numbers of the steps, the same in all ranks. One that is lower than the one before: all have gone back."""

    wishes: tuple[tuple[int, str], ...]
    """What comes up, each in a rank, once, at any moment."""

    n_ranks: int = 2
    lead: int = 99
    """How many steps a rank may be ahead of another one: a collective in each step makes it 1."""

    deaths: int = 0
    """How many ranks may be lost, at any moment."""

    starts_apart: bool = False
    """True: each rank starts, or restores, at a moment of its own, and no round is held before all have."""

    meets: tuple[int, ...] = ()
    """So many steps passed, all ranks meet, as for a save that the training waits for."""

    respects_stop: bool = True
    """False: the training is told of the stop and goes on."""

    saves_at_stop: bool = True
    """False: the job says Skip."""

    ends_itself: bool = False
    """True: the program ends its loop after the last step for a notice that it has got too, as Lightning's does."""

    is_last_unsaved: bool = True
    """True: at the training's end the last step isn't saved yet."""

    failures: int = 0
    """How often the save of a stop step fails on a rank, whether the others see its commit or not."""

    def next_after(self, beyond: Position) -> int | None:
        """Return the index of the first step beyond a position; None if training ends before it."""
        n_returns = 0
        for index, step in enumerate(self.steps):
            n_returns += index > 0 and step < self.steps[index - 1]
            if (n_returns, step) > (beyond.n_returns, beyond.step):
                return index
        return None


class RankState(NamedTuple):
    view: RankView
    ending: Ending
    at: int = 0
    """How many steps it has passed."""

    started: bool = True
    is_dead: bool = False
    came_to: tuple[tuple[Move, int], ...] = ()
    """The moves that all ranks make together to which it has come, each with its number."""

    begun: bool = False
    """Its present move is begun: what it sends is sent, and it waits for what comes of it."""

    failed: bool = False
    """Its agreement has ended with an error, which the train thread raises at the next step."""

    acted: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Steps after which it was told of wishes that are due."""

    wished: tuple[str, ...] = ()
    """What came up here before it left."""

    ends_itself: bool = False

    @property
    def fate(self) -> Fate:
        if self.is_dead:
            return Fate.DEAD
        if self.ending.is_closed:
            return Fate.GAVE_UP if self.ending.code == ExitCode.PEER_LOST else Fate.LEFT
        if self.ending.is_leaving and self.ending.move is None:
            return Fate.TRAINING
        is_ending = self.ending.has_stopped or self.ending.move is not None
        return Fate.ENDING if is_ending else Fate.TRAINING


class _Round(NamedTuple):
    name: str | None = None
    passed: tuple[Position | None, ...] = ()
    beyond: Position | None = None


class World(NamedTuple):
    ranks: tuple[RankState, ...]
    rounds: tuple[_Round, ...] = ()
    to_come: tuple[tuple[int, str], ...] = ()
    deaths: int = 0
    failures: int = 0


class Action(NamedTuple):
    kind: str
    rank: int
    name: str = ""


_GONE = (Fate.LEFT, Fate.GAVE_UP, Fate.DEAD)
_LOST = (Fate.GAVE_UP, Fate.DEAD)
_TOGETHER = (Move.MEET, Move.SAVE_STOP, Move.AGREE, Move.SAVE_LAST)


def start(setting: Setting) -> World:
    """Return the world before any step."""
    ending = Ending(saves_at_stop=setting.saves_at_stop)
    ranks = tuple(
        RankState(RankView(rank=rank), ending, started=not setting.starts_apart)
        for rank in range(setting.n_ranks)
    )
    return World(ranks, to_come=setting.wishes, deaths=setting.deaths, failures=setting.failures)


def actions(world: World, setting: Setting) -> Iterator[Action]:
    """Yield all that can happen next."""
    for rank, name in world.to_come:
        if world.ranks[rank].started:
            yield Action("wish", rank, name)
    for rank, state in enumerate(world.ranks):
        if state.fate in _GONE:
            continue
        if world.deaths:
            yield Action("die", rank)
        if not state.started:
            yield Action("start", rank)
            continue
        if not state.failed:
            if _can_move(world, rank):
                yield Action("move", rank)
            if _hears_of_loss(world, rank):
                yield Action("hear of loss", rank)
        if _can_train(world, rank, setting):
            yield Action("train", rank)
            if world.failures and state.ending.move is Move.SAVE_STOP:
                yield Action("fail", rank)


def act(world: World, action: Action, setting: Setting) -> World:
    kind, rank, name = action
    state = world.ranks[rank]
    match kind:
        case "wish":
            left = tuple(each for each in world.to_come if each != (rank, name))
            world = world._replace(to_come=left)
            if state.fate in _GONE:
                return world
            view, wished = state.view.wish(name), (*state.wished, name)
            return _with(world, rank, state._replace(view=view, wished=wished))
        case "die":
            world = world._replace(deaths=world.deaths - 1)
            return _with(world, rank, state._replace(is_dead=True))
        case "start":
            return _with(world, rank, state._replace(started=True))
        case "hear of loss":
            return _with(world, rank, state._replace(failed=True))
        case "train":
            return _with(world, rank, _train(world, rank, setting))
        case "fail":
            ending = state.ending.on_stop_tried("it failed", may_retry=True)
            world = world._replace(failures=world.failures - 1)
            return _with(world, rank, _come(state._replace(ending=ending)))
        case _:
            return _move(world, rank)


def _train(world: World, rank: int, setting: Setting) -> RankState:
    """Let the train thread of a rank pass a step, or make the next move of its ending."""
    state = world.ranks[rank]
    if state.ending.move is Move.CLOSE:
        # It waits for its own saves only, and a loss ends the wait.
        return state._replace(ending=state.ending.on_closed())
    if state.failed and state.ending.move is not Move.SAVE_STOP:
        return _come(state._replace(ending=state.ending.close_with(ExitCode.PEER_LOST)))
    if state.ending.move is not None:
        return _come(state._replace(ending=_end(world, rank, setting)))
    if state.ending.has_stopped:
        return _come(state._replace(ending=state.ending.leave()))
    if state.at == len(setting.steps):
        ends_itself = setting.ends_itself and not set(STOPS).isdisjoint(state.wished)
        ending = state.ending.leave(ends_itself=ends_itself)
        return _come(state._replace(ending=ending, ends_itself=ends_itself))
    step = setting.steps[state.at]
    view, due = state.view.pass_step(step)
    acted = (*state.acted, (step, due)) if due else state.acted
    ending = state.ending if set(STOPS).isdisjoint(due) else state.ending.reach(step)
    ending = ending.stop() if ending.stop_step == step and setting.respects_stop else ending
    return _come(state._replace(view=view, at=state.at + 1, acted=acted, ending=ending))


def _end(world: World, rank: int, setting: Setting) -> Ending:
    """Return what comes of a rank's move if nothing fails, or if a rank that it needs is lost."""
    ending, states = world.ranks[rank].ending, world.ranks
    match ending.move:
        case Move.MEET | Move.SAVE_STOP:
            all_came = all(_key(states[rank]) in state.came_to for state in states)
            return ending.on_stop_tried(None if all_came else "not all ranks came")
        case Move.AGREE:
            last = setting.steps[-1] if setting.steps and setting.is_last_unsaved else None
            ends = [EndChoice(last, state.ends_itself) for state in states]
            return ending.on_end_agreed(choose_end(ends))
        case _:
            return ending.close_with(ExitCode.DONE)


def _key(state: RankState) -> tuple[Move, int] | None:
    """Return the move that a rank now makes together with the others; None if it makes none."""
    move = state.ending.move
    return None if move not in _TOGETHER or move is None else (move, state.ending.n_tries)


def _come(state: RankState) -> RankState:
    key = _key(state)
    return state if key is None else state._replace(came_to=(*state.came_to, key))


def _can_train(world: World, rank: int, setting: Setting) -> bool:
    state = world.ranks[rank]
    if state.failed:
        return True
    others = [other for number, other in enumerate(world.ranks) if number != rank]
    if state.ending.move is not None or state.ending.has_stopped:
        key = _key(state)
        # A rank that saw the commit has left, and starts nothing again: those that didn't hear that it is gone.
        gives_up = state.ending.n_tries > 0 and any(other.fate is Fate.LEFT for other in others)
        return key is None or gives_up or all(key in other.came_to for other in others)
    if state.at in setting.meets and any(other.at < state.at or not other.started for other in others):
        return False
    slowest = min((other.at for other in others if other.fate not in _GONE), default=state.at)
    return not state.view.is_held and state.at < slowest + setting.lead


def _can_move(world: World, rank: int) -> bool:
    if not all(state.started for state in world.ranks):
        return False
    state = world.ranks[rank]
    move = state.view.next_move()
    if not state.begun or isinstance(move, Listen | Open):
        return True
    number = move.number
    if isinstance(move, Answer):
        return rank != 0 or None not in world.rounds[number].passed
    return number < len(world.rounds) and world.rounds[number].beyond is not None


def _hears_of_loss(world: World, rank: int) -> bool:
    """Return True if a rank is lost; or if this one waits for a rank that has left, or for the store that went with it.

    Where no rank is lost this must never be: it would be an error in a training that has none.
    """
    if any(other.fate in _LOST for other in world.ranks):
        return True
    state = world.ranks[rank]
    if state.fate is not Fate.TRAINING:
        return False
    if world.ranks[0].fate is Fate.LEFT:
        return True
    move = state.view.next_move()
    if rank == 0 and isinstance(move, Answer) and state.begun:
        answers = world.rounds[move.number].passed
        return any(
            other.fate is Fate.LEFT and answers[number] is None for number, other in enumerate(world.ranks)
        )
    return False


def _move(world: World, rank: int) -> World:
    """Carry out one access to the store of a rank's present move."""
    state = world.ranks[rank]
    view, move = state.view, state.view.next_move()
    rounds = list(world.rounds) + [_Round()] * (move.number + 1 - len(world.rounds))
    found = rounds[move.number]
    begun = False
    match move:
        case Open(_, name) if not state.begun:
            found, begun = found._replace(name=found.name or name), True
        case Listen() | Open():
            view = view.receive_wish(found.name)
        case Answer(_, passed) if not state.begun:
            known = found.passed or (None,) * len(world.ranks)
            found = found._replace(passed=(*known[:rank], passed, *known[rank + 1 :]))
            begun = rank == 0
            view = view if begun else view.receive_answers(())
        case Answer():
            view = view.receive_answers(tuple(each for each in found.passed if each is not None))
        case Conclude(_, beyond):
            found = found._replace(beyond=beyond)
            view = view.receive_conclusion(beyond)
        case Await() if not state.begun:
            begun = True
        case Await():
            assert found.beyond is not None
            view = view.receive_conclusion(found.beyond)
    rounds[move.number] = found
    if found == _Round():
        rounds = list(world.rounds)
    after = _with(world, rank, state._replace(view=view, begun=begun))
    return after._replace(rounds=tuple(rounds))


def _with(world: World, rank: int, state: RankState) -> World:
    return world._replace(ranks=(*world.ranks[:rank], state, *world.ranks[rank + 1 :]))
