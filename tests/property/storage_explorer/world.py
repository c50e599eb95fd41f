"""A bucket and the processes around it, one store call at a time: every order of them, and every fault, or some."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from storage_explorer.buckets import Buckets
from storage_explorer.oracle import LOG, Reading, ViolationError, check_data, check_told, read_log
from storage_explorer.replay import IMPATIENT, NO_ANSWER, Ahead, Histories, Op, Program

from stepkeeper.errors import LogFormatError
from stepkeeper.log import Log
from stepkeeper.log.replay import apply_entry
from stepkeeper.log.state import LogState
from stepkeeper_testing.memory import MemoryBucket, MemoryStore

_SENT: Final = ("put", "write")
"""What can be lost, late, or there twice."""

_FATES: Final = ("lost", "unanswered", "late", "twice")
"""Of what is sent, but for being answered as it should be."""


class State(NamedTuple):
    bucket: int
    late: tuple[Op, ...]
    """Requests on their way, whose senders wait no longer."""

    histories: tuple[int, ...]
    crashed: frozenset[int]
    faults: int
    """How many more there may be."""

    last: int
    """The process that moved last, where switches are counted."""

    switches: int
    """How many more times another process may go on while the last one could; -1: not counted."""


class Action(NamedTuple):
    process: int
    fate: str
    """answered, lost, unanswered, late, twice; crash; arrives (a late request, of no process)."""

    choice: int = 0


class FoundError(AssertionError):
    """A schedule that breaks an invariant."""

    def __init__(self, why: str, schedule: Sequence[str]) -> None:
        steps = "\n".join(f"  {number:3} {step}" for number, step in enumerate(schedule, 1))
        super().__init__(f"{why}\nafter these steps:\n{steps}")


@dataclass
class Explored:
    states: int = 0
    steps: int = 0
    buckets: int = 0
    histories: int = 0
    ends: int = 0
    """States in which nothing is left to do."""

    told: frozenset[str] = frozenset()
    """Kinds of notes that processes took: what the schedules got to."""

    crashed: set[int] = field(default_factory=set)
    """The processes that crashed in some of the schedules."""

    def count(self, action: Action) -> None:
        self.steps += 1
        if action.fate == "crash":
            self.crashed.add(action.process)


@final
class Explorer:
    """`programs` around a bucket that holds `objects`, with up to `faults` of puts and writes."""

    def __init__(
        self,
        programs: Sequence[Program],
        region: int,
        *,
        objects: Mapping[str, bytes] | None = None,
        faults: int = 0,
        switches: int = -1,
        crashes: Sequence[int] = (),
    ) -> None:
        self._histories = Histories(programs, region)
        self._buckets = Buckets()
        self._crashes = frozenset(crashes)
        self._answers = self._buckets.answers
        self._no_answer = self._answers.number(NO_ANSWER)
        self._readings: dict[int, Reading] = {}
        self._told_right: set[tuple[int, int]] = set()
        self._opened: set[frozenset[tuple[str, bytes]]] = set()
        bucket = self._buckets.number(objects or {})
        self.start = State(
            bucket=bucket,
            late=(),
            histories=tuple(
                self._histories.start(number, self._ahead(bucket)) for number in range(len(programs))
            ),
            crashed=frozenset(),
            faults=faults,
            last=-1,
            switches=switches,
        )

    def objects(self, state: State) -> Mapping[str, bytes]:
        return self._buckets.contents[state.bucket]

    def alone(self, state: State) -> State:
        """The state once the processes have run to their ends without faults, one after the other."""
        while actions := [action for action in self.actions(state) if action.fate == "answered"]:
            state = self.step(state, actions[0])
            self.check(state)
        return state

    def explore(self) -> Explored:
        """Look at every state that can be reached. Raises FoundError."""
        explored = Explored()
        seen = {hash(self.start)}
        path: list[Action] = []
        stack = [(self.start, iter(self.actions(self.start)))]
        self._checked(self.start, path)
        while stack:
            state, actions = stack[-1]
            action = next(actions, None)
            if action is None:
                stack.pop()
                del path[len(stack) - 1 if stack else 0 :]
                continue
            after = self.step(state, action)
            explored.count(action)
            if hash(after) in seen:
                continue
            seen.add(hash(after))
            path.append(action)
            self._checked(after, path)
            following = list(self.actions(after))
            explored.ends += not following
            stack.append((after, iter(following)))
        explored.states = len(seen)
        return self._counted(explored)

    def wander(self, seed: int, walks: int) -> Explored:
        """Run that many schedules, drawn at random, to their ends. Raises FoundError, naming the walk's seed."""
        explored = Explored()
        seen: set[int] = set()
        for walk in range(walks):
            chance = random.Random(f"{seed}/{walk}")
            state, path = self.start, list[Action]()
            weights = [chance.random() ** 2 + 0.01 for _ in state.histories]
            while actions := list(self.actions(state)):
                action = _drawn(chance, actions, weights)
                path.append(action)
                explored.count(action)
                state = self.step(state, action)
                self._checked(state, path, f"seed {seed}, walk {walk}: ")
                seen.add(hash(state))
            explored.ends += 1
        explored.states = len(seen)
        return self._counted(explored)

    def actions(self, state: State) -> Iterator[Action]:
        able = [process for process in range(len(state.histories)) if self._can_move(state, process)]
        if state.switches == 0 and state.last in able:
            able = [state.last]
        for process in able:
            op = self._histories.next(state.histories[process])
            assert op is not None
            if op.kind == "choose":
                yield from (Action(process, "answered", choice) for choice in range(op.first))
                continue
            yield Action(process, "answered")
            if state.faults and op.kind in _SENT:
                yield from (Action(process, fate) for fate in _FATES)
            if process in self._crashes:
                yield Action(process, "crash")
        yield from (Action(-1, "arrives", number) for number in range(len(state.late)))

    def _can_move(self, state: State, process: int) -> bool:
        op = self._histories.next(state.histories[process])
        if op is None or process in state.crashed:
            return False
        return op.kind != "await" or op.first in state.crashed

    def step(self, state: State, action: Action) -> State:
        if action.fate == "arrives":
            arrived = state.late[action.choice]
            late = state.late[: action.choice] + state.late[action.choice + 1 :]
            return state._replace(bucket=self._buckets.applied(state.bucket, arrived)[0], late=late)
        if action.fate == "crash":
            return state._replace(crashed=state.crashed | {action.process})
        op = self._histories.next(state.histories[action.process])
        assert op is not None
        state = self._moved(state, action.process)
        if op.kind == "choose":
            return self._answered(state, action.process, self._answers.number(action.choice))
        if op.kind == "await":
            notes = self._histories.notes(state.histories[op.first])
            return self._answered(state, action.process, self._answers.number(notes))
        applied, answer = self._buckets.applied(state.bucket, op)
        if action.fate == "answered":
            return self._answered(state._replace(bucket=applied), action.process, answer)
        state = state._replace(faults=state.faults - 1)
        if action.fate in ("unanswered", "twice"):
            state = state._replace(bucket=applied)
        if action.fate in ("late", "twice"):
            state = state._replace(late=self._underway(state, op))
        return self._answered(state, action.process, answer if action.fate == "twice" else self._no_answer)

    def check(self, state: State) -> None:
        """Raises ViolationError if an invariant doesn't hold in `state`."""
        objects = self._buckets.contents[state.bucket]
        reading = self._readings.get(state.bucket)
        if reading is None:
            reading = self._readings[state.bucket] = read_log(objects)
            for commit in reading.live.values():
                check_data(objects, commit)
            self._check_opening(objects)
        for process, history in enumerate(state.histories):
            if (state.bucket, history) in self._told_right:
                continue
            error = self._histories.error(history)
            if error is not None:
                raise ViolationError(f"process {process} ended with {error!r}") from error
            check_told(reading, objects, self._histories.notes(history))
            self._told_right.add((state.bucket, history))

    def _check_opening(self, objects: Mapping[str, bytes]) -> None:
        """A new process opens the log, from whatever index, as if it had read all of it, and can begin."""
        log = frozenset(item for item in objects.items() if item[0].startswith(LOG))
        if log in self._opened:
            return
        self._opened.add(log)
        whole, before = LogState(tail=-1), _log_in(dict(log))
        for slot in range(len(log)):
            whole = apply_entry(whole, slot, before.entry(slot))
        try:
            opened = _log_in(dict(log)).open()
        except LogFormatError as error:
            raise ViolationError(f"the log contradicts itself: {error}") from error
        if opened != whole:
            raise ViolationError(f"opening the log makes {opened}, reading it whole {whole}")

    def _answered(self, state: State, process: int, answer: int) -> State:
        before = state.histories
        told = self._answers.values[answer]
        after = self._histories.answered(before[process], answer, told, self._ahead(state.bucket))
        return state._replace(histories=(*before[:process], after, *before[process + 1 :]))

    def _ahead(self, bucket: int) -> Ahead:
        """Return what a process is told that goes on alone, without faults, as one of the schedules has it."""

        def ahead(op: Op) -> tuple[int, Any] | None:
            nonlocal bucket
            if op.kind in ("choose", "await"):
                return None
            bucket, answer = self._buckets.applied(bucket, op)
            return answer, self._answers.values[answer]

        return ahead

    def _moved(self, state: State, process: int) -> State:
        if state.switches < 0 or process == state.last:
            return state
        switched = state.last >= 0 and self._can_move(state, state.last)
        return state._replace(last=process, switches=state.switches - switched)

    def _underway(self, state: State, op: Op) -> tuple[Op, ...]:
        """A put of a slot that is taken comes to nothing, whenever it comes."""
        if op.path.startswith(LOG) and op.path in self._buckets.contents[state.bucket]:
            return state.late
        return tuple(sorted((*state.late, op)))

    def _checked(self, state: State, path: Sequence[Action], where: str = "") -> None:
        try:
            self.check(state)
        except ViolationError as violation:
            raise FoundError(f"{where}{violation}", self._told(path)) from violation

    def _told(self, path: Sequence[Action]) -> list[str]:
        state, told = self.start, []
        for action in path:
            if action.fate == "arrives":
                told.append(f"late:      {state.late[action.choice]} arrives")
            else:
                asked = self._histories.next(state.histories[action.process])
                fate = "" if action.fate == "answered" else f" -> {action.fate}"
                told.append(f"process {action.process}: {asked}{fate}")
            state = self.step(state, action)
        return told

    def _counted(self, explored: Explored) -> Explored:
        explored.buckets, explored.histories = len(self._buckets.contents), len(self._histories)
        explored.told = self._histories.kinds_of_notes()
        return explored


def _log_in(objects: Mapping[str, bytes]) -> Log:
    bucket = MemoryBucket()
    bucket.objects = dict(objects)
    return Log(MemoryStore(bucket), patience=IMPATIENT)


def _drawn(chance: random.Random, actions: Sequence[Action], weights: Sequence[float]) -> Action:
    """Processes run at speeds of their own, and faults are rarer than answers."""

    def weight(action: Action) -> float:
        if action.process < 0:
            return 0.1
        return weights[action.process] * (1.0 if action.fate == "answered" else 0.1)

    return chance.choices(actions, [weight(action) for action in actions])[0]
