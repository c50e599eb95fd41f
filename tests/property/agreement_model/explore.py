"""Visit every state that a world can come to, and check what must hold in it."""

from dataclasses import dataclass

from agreement_model.world import Action, Fate, RankState, Setting, World, act, actions, start

from stepkeeper.contract import ExitCode
from stepkeeper.coordination.agreement_rules import STOP, STOPS, kills_for


class FoundError(AssertionError):
    """A schedule that breaks an invariant."""


@dataclass
class Explored:
    states: int = 0
    ends: int = 0
    stopped: int = 0
    """Ends in which the ranks had stopped because of a notice."""

    finished: int = 0
    gave_up: int = 0


def explore(setting: Setting) -> Explored:
    """Visit all states, depth first.

    Raises:
        FoundError: An invariant doesn't hold; the error tells the schedule that leads there.

    """
    found = Explored()
    first = start(setting)
    came_from: dict[World, tuple[World, Action] | None] = {first: None}
    stack = [first]
    while stack:
        world = stack.pop()
        found.states += 1
        why = _broken(world, setting)
        nexts = []
        for action in actions(world, setting):
            after = act(world, action, setting)
            if after != world:
                nexts.append((action, after))
        if not any(action.kind not in ("die", "wish") for action, _ in nexts):
            # Nothing may come any more: the ranks must have come to an end without it.
            why = why or _broken_end(world, setting)
            _count_end(found, world)
        if why is not None:
            raise FoundError(f"{why}\n{world}\nafter:\n{_schedule(came_from, world)}")
        for action, after in nexts:
            if after not in came_from:
                came_from[after] = (world, action)
                stack.append(after)
    return found


def _broken(world: World, setting: Setting) -> str | None:
    acted = sorted((state.acted for state in world.ranks), key=len)
    longest = acted[-1]
    if any(each != longest[: len(each)] for each in acted):
        return "ranks were told of different wishes, or after different steps"
    if not any(state.fate is Fate.DEAD for state in world.ranks) and any(
        state.failed for state in world.ranks
    ):
        return "a rank gives up though none is lost"
    if any(state.ending.is_leaving and state.fate is Fate.TRAINING for state in world.ranks):
        return "a program that has ended gets the thread back"
    if lost := [name for state in world.ranks for name in state.wished if not _is_known(state, name)]:
        return f"{lost} got lost"
    if any(_kills(state) != _is_to_be_killed(world, state) for state in world.ranks if _has_stopped(state)):
        return "a rank takes the stop for one that nobody is killed for, or the other way round"
    for agreed in (agreed for state in world.ranks for agreed in state.view.agreed):
        due = setting.next_after(agreed.beyond)
        ahead = max(state.at for state in world.ranks)
        if (
            due is not None
            and due < ahead - 1
            and not any(agreed.name in names for state in world.ranks for _, names in state.acted)
        ):
            return "a wish is due at a step that a rank has passed"
    return None


def _kills(state: RankState) -> bool | None:
    return kills_for({*_told(state), state.view.agreed_stop})


def _is_to_be_killed(world: World, state: RankState) -> bool:
    """Return True if a rank that has stopped knows of a round about a stop that somebody is killed for."""
    return any(found.name == STOP for found in world.rounds[: state.view.n_rounds])


def _is_known(state: RankState, name: str) -> bool:
    view = state.view
    agreed = {agreed.name for agreed in view.agreed}
    return name in view.wishes or name in agreed or any(name in due for _, due in state.acted)


def _broken_end(world: World, setting: Setting) -> str | None:
    if stuck := [
        rank
        for rank, state in enumerate(world.ranks)
        if state.fate not in (Fate.LEFT, Fate.GAVE_UP, Fate.DEAD)
    ]:
        return f"ranks {stuck} are stuck"
    if any(state.fate is Fate.DEAD for state in world.ranks):
        return None
    if len({(state.acted, state.at) for state in world.ranks}) > 1:
        return "ranks came to different ends"
    for number, found in enumerate(world.rounds):
        comes = found.beyond is not None and setting.next_after(found.beyond) is not None
        told = found.name in {name for _, names in world.ranks[0].acted for name in names}
        if comes and not told and not _has_stopped(world.ranks[0]):
            return f"what round {number} was about got lost: {found.name}"
    if len({state.ending.code for state in world.ranks}) > 1:
        return "ranks end with different codes"
    return None


def _has_stopped(state: RankState) -> bool:
    return not set(STOPS).isdisjoint(_told(state))


def _told(state: RankState) -> set[str]:
    return {name for _, due in state.acted for name in due}


def _count_end(found: Explored, world: World) -> None:
    found.ends += 1
    found.gave_up += any(state.fate is Fate.GAVE_UP for state in world.ranks)
    if all(state.fate is Fate.LEFT for state in world.ranks):
        stopped = world.ranks[0].ending.code == ExitCode.SAVED
        found.stopped += stopped
        found.finished += not stopped


def _schedule(came_from: dict[World, tuple[World, Action] | None], world: World) -> str:
    steps: list[str] = []
    while (before := came_from[world]) is not None:
        world, (kind, rank, name) = before
        steps.append(f"  rank {rank}: {kind} {name}".rstrip())
    return "\n".join(reversed(steps))
