"""Shipped code as a function: from the answers that a process has got so far to what it asks of the store next.

A process is run from its start with the answers known so far; at the first question without one it is left. So a
process has no hidden state: where it stands is its history, which can be kept, compared and gone on from many times,
and each history is run once. The code must do the same whenever it gets the same answers; what the store was asked on
the way is compared to prove it.
"""

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, Self, final, get_type_hints
from unittest import mock

from typing_extensions import override

from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.errors import TransientStorageError
from stepkeeper.log import Entry
from stepkeeper.storage.base import Buffer, ObjectStat, PagedStore
from stepkeeper.storage.retry import Patience

IMPATIENT: Final = Patience(total_s=0.0, sleep=lambda _: None)
"""Asks once: asking again is for the program to do, so that no fault is hidden in a loop."""


class Op(NamedTuple):
    """A request that a process makes."""

    kind: str
    """Of the store: put, write, read, list, page, delete. Of the schedule: choose, await."""

    path: str = ""
    data: bytes = b""
    first: int = 0
    second: int | None = None

    @override
    def __str__(self) -> str:
        return " ".join(filter(None, [self.kind, self.path, str(self.first or "")]))


class Refused(NamedTuple):
    kind: type[Exception]
    message: str


NO_ANSWER: Final = Refused(TransientStorageError, "no answer")


class Paused(BaseException):
    """The process has asked for something that nobody has answered yet."""


class Process(PagedStore, Protocol):
    """A process as its program knows it: the root, as a store, and what else there is to ask and to tell."""

    region: int
    """A file with the bytes of a save."""

    def note(self, *note: Any) -> None:
        """Note what the process has been told by now, for the invariants."""
        ...

    def choose(self, n: int) -> int:
        """A number below `n`; each has its schedules."""
        ...

    def notes_of_dead(self, process: int) -> tuple[tuple[Any, ...], ...]:
        """Wait for a process's death, and return what it had noted."""
        ...

    def nonce(self) -> str:
        """Another name each time, and none of another process."""
        ...


Program = Callable[[Process], None]

Ahead = Callable[[Op], tuple[int, Any] | None]
"""What a process would be told if it went on alone: a number for the answer, and the answer. None: it isn't known."""


class _Point(NamedTuple):
    """A question, what the process was told before, and the answer that it got."""

    op: Op
    notes: tuple[tuple[Any, ...], ...]
    key: int
    answer: Any


@final
class Driver:
    """The world as one process sees it in one run."""

    uri = "memory://model"

    def __init__(self, number: int, known: Sequence[tuple[Op, Any]], ahead: Ahead, region: int) -> None:
        self.number = number
        self.region = region
        self.notes: list[tuple[Any, ...]] = []
        self.points: list[_Point] = []
        self.next: Op | None = None
        self._known = known
        self._ahead = ahead
        self._place = 0
        self._nonces = 0

    def ask(self, op: Op) -> Any:
        """The answer to `op`. Raises Paused if there is none yet: then and ever after."""
        if self.next is not None:
            raise Paused
        if self._place < len(self._known):
            asked, answer = self._known[self._place]
            assert asked == op, "the same answers led to another question"
            self._place += 1
        else:
            found = self._ahead(op)
            if found is None:
                self.next = op
                raise Paused
            answer = found[1]
            self.points.append(_Point(op, tuple(self.notes), *found))
        if isinstance(answer, Refused):
            raise answer.kind(answer.message)
        return answer

    def note(self, *note: Any) -> None:
        self.notes.append(note)

    def notes_of_dead(self, process: int) -> tuple[tuple[Any, ...], ...]:
        notes: tuple[tuple[Any, ...], ...] = self.ask(Op("await", first=process))
        return notes

    def choose(self, n: int) -> int:
        return int(self.ask(Op("choose", first=n)))

    def nonce(self) -> str:
        self._nonces += 1
        return f"{self.number + 1:02x}{self._nonces:030x}"

    # A store:

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return bool(self.ask(Op("put", path, data)))

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self.ask(Op("write", path, b"".join(parts)))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return bytes(self.ask(Op("read", path, first=offset, second=length)))

    def list_page(self, prefix: str, start: str, limit: int) -> Sequence[ObjectStat]:
        found: tuple[ObjectStat, ...] = self.ask(Op("page", prefix, start.encode(), limit))
        return found

    def list(self, prefix: str) -> list[ObjectStat]:
        return [*self.ask(Op("list", prefix))]

    def delete(self, path: str) -> None:
        self.ask(Op("delete", path))

    def close(self) -> None:
        """Nothing is open."""


@dataclass(slots=True)
class _Node:
    """A process after some answers."""

    program: int
    parent: int | None
    answer: Any
    """To the parent's question."""

    next: Op | None
    """None: it has ended."""

    notes: tuple[tuple[Any, ...], ...]
    error: BaseException | None = None
    after: dict[int, int] = field(default_factory=dict)


@final
class Histories:
    """All histories that were come by, each with a number."""

    def __init__(self, programs: Sequence[Program], region: int) -> None:
        self._programs = programs
        self._region = region
        self._nodes: list[_Node] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def start(self, program: int, ahead: Ahead) -> int:
        return self._run(program, None, None, ahead)

    def next(self, history: int) -> Op | None:
        return self._nodes[history].next

    def notes(self, history: int) -> tuple[tuple[Any, ...], ...]:
        return self._nodes[history].notes

    def kinds_of_notes(self) -> frozenset[str]:
        return frozenset(note[0] for node in self._nodes for note in node.notes)

    def error(self, history: int) -> BaseException | None:
        return self._nodes[history].error

    def answered(self, history: int, key: int, answer: Any, ahead: Ahead) -> int:
        """The history that goes on from `history` with `answer`, which is the same for an equal `key`.

        Where it is new, those that follow from `ahead` are made in the same run.
        """
        node = self._nodes[history]
        found = node.after.get(key)
        if found is None:
            found = node.after[key] = self._run(node.program, history, answer, ahead)
        return found

    def _run(self, program: int, parent: int | None, answer: Any, ahead: Ahead) -> int:
        driver = Driver(program, self._known(parent, answer), ahead, self._region)
        error: BaseException | None = None
        try:
            with _running(driver), redirect_stderr(io.StringIO()):
                self._programs[program](driver)
        except Paused:
            pass
        except BaseException as raised:  # it is a finding, told with its schedule
            error = raised
        first = number = len(self._nodes)
        for point in driver.points:
            node = _Node(program, parent, answer, point.op, point.notes, after={point.key: number + 1})
            self._nodes.append(node)
            parent, answer, number = number, point.answer, number + 1
        self._nodes.append(_Node(program, parent, answer, driver.next, tuple(driver.notes), error))
        return first

    def _known(self, parent: int | None, answer: Any) -> list[tuple[Op, Any]]:
        """Questions and answers up to a history that isn't there yet."""
        known = []
        while parent is not None:
            node = self._nodes[parent]
            assert node.next is not None
            known.append((node.next, answer))
            parent, answer = node.parent, node.answer
        return known[::-1]


_CURRENT: Final[list[Process]] = []
"""The process that runs now, after those that wait for it."""


@contextmanager
def _running(process: Process) -> Iterator[None]:
    """Sessions and logs that are made here are those of `process`."""
    _CURRENT.append(process)
    try:
        yield
    finally:
        _CURRENT.pop()


class _InlineExecutor:
    """Work is done where it is given: in one order."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "_Done":
        return _Done(work(*arguments))

    def map(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        return map(work, *arguments)

    def shutdown(self, **options: object) -> None:
        pass


class _Done(NamedTuple):
    value: Any

    def result(self) -> Any:
        return self.value


@contextmanager
def shipped_code(index_every: int) -> Iterator[int]:
    """The shipped code does the same when it is run again; yields the descriptor of a region with a few bytes.

    Random names become numbered ones, threads none, and the store of a session is the process's own.
    """
    region = os.memfd_create("region")
    os.write(region, b"data")

    def nonce() -> str:
        return _CURRENT[-1].nonce()

    def own_root(uri: str, *, unsafe_single_writer: bool) -> Process:
        assert uri == _CURRENT[-1].uri
        return _CURRENT[-1]

    with (
        mock.patch("stepkeeper.log.appending.new_nonce", nonce),
        mock.patch("stepkeeper.retention.pins.new_nonce", nonce),
        mock.patch("stepkeeper.companion.session.open_store", own_root),
        mock.patch("stepkeeper.checkpoint.writing.ThreadPoolExecutor", _InlineExecutor),
        mock.patch("stepkeeper.log.replay._INTERVAL", index_every),
        mock.patch("stepkeeper.retention.leases.LEASE_S", 0.0),
        # Pure, and asked the same in every run.
        mock.patch.object(Entry, "from_json", lru_cache(maxsize=None)(Entry.from_json)),
        mock.patch.object(Manifest, "from_json", lru_cache(maxsize=None)(Manifest.from_json)),
        mock.patch("stepkeeper.contract.wire.typing.get_type_hints", lru_cache(maxsize=None)(get_type_hints)),
    ):
        try:
            yield region
        finally:
            os.close(region)
            sys.stderr.flush()
