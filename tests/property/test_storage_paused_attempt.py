"""A process that stops at any of its storage calls while the next attempt runs, and then goes on: on memory, on files.

The next one begins, collects, restores, saves twice, and deletes what retention doesn't keep. The old one is an attempt
that saves, deletes and collects, one that saves a step again, a person's collection or removal, or a reader.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar, final

import pytest
from storage_explorer.oracle import Reading, check_data, read_log
from storage_explorer.programs import attempt, collector, reader, remover
from storage_explorer.replay import Program, running, shipped_code

from stepkeeper.storage.base import Buffer, ObjectStat, Store
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.posix import PosixStore

T = TypeVar("T")
_LOG: Final = ".stepkeeper/log/"
GARBAGE: Final = f"15/0-{'e' * 32}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """The process that is held up."""

    program: Program
    asks: frozenset[str]
    """What it is held up at, among other things: kinds of entries, of operations, of objects."""


_SAVING: Final = frozenset({"begin", "restored", "commit", "write", "page", "read", "list"})
OLD: Final = {
    "saving": Old(program=attempt(20, start=1, last=3), asks=_SAVING | {"delete: garbage"}),
    "saving-again": Old(program=attempt(10, start=1, last=3), asks=_SAVING),
    "deleting": Old(
        program=attempt(20, start=1), asks=_SAVING | {"delete", "delete: a commit", "delete: garbage"}
    ),
    "collecting": Old(program=collector(), asks=frozenset({"page", "list", "delete: garbage"})),
    "removing": Old(program=remover(5), asks=frozenset({"begin", "delete", "delete: a commit"})),
    "reading": Old(program=reader(oldest=True), asks=frozenset({"pin", "read", "delete: a pin"})),
}


@final
class Attempt:
    """A process on a real store, with something that happens before, or after, one of its calls."""

    def __init__(
        self,
        number: int,
        store: Store,
        region: int,
        *,
        at: tuple[int, str] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.region = region
        self.notes: list[tuple[Any, ...]] = []
        self.asked: set[str] = set()
        self._number = number
        self._store = store
        self._at = at
        self._meanwhile = meanwhile
        self._calls = 0
        self._counting = Lock()
        self._nonces = 0

    @property
    def uri(self) -> str:
        return self._store.uri

    def run(self, program: Program) -> int:
        """It has ended; answers how many storage calls that took."""
        with running(self):
            program(self)
        return self._calls

    def told(self, kind: str) -> set[Any]:
        return {note[1] for note in self.notes if note[0] == kind}

    def note(self, *note: Any) -> None:
        self.notes.append(note)

    def choose(self, n: int) -> int:
        return n - 1

    def notes_of_dead(self, process: int) -> tuple[tuple[Any, ...], ...]:
        raise NotImplementedError

    def damage(self, path: str, *, gone: bool) -> bool:
        raise NotImplementedError

    def nonce(self) -> str:
        self._nonces += 1
        return f"{self._number:02x}{self._nonces:030x}"

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.asked.add(json.loads(data)["kind"] if path.startswith(_LOG) else "pin")
        return self._called(lambda: self._store.put_if_absent(path, data))

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self.asked.add("write")
        self._called(lambda: self._store.write(path, parts))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.asked.add("read")
        return self._called(lambda: self._store.read(path, offset, length))

    def list_page(self, prefix: str, start: str, limit: int) -> Sequence[ObjectStat]:
        self.asked.add("page")
        found = self._called(lambda: self._store.list(prefix))
        return [stat for stat in found if stat.path >= start][:limit]

    def list(self, prefix: str) -> list[ObjectStat]:
        self.asked.add("list")
        return self._called(lambda: self._store.list(prefix))

    def delete(self, path: str) -> None:
        what = "a pin" if path.startswith(".stepkeeper") else "garbage" if GARBAGE in path else "a commit"
        self.asked.add(f"delete: {what}")
        self._called(lambda: self._store.delete(path))

    def close(self) -> None:
        """Nothing is open."""

    def _called(self, call: Callable[[], T]) -> T:
        # Several threads read blocks at once: each call keeps its own number.
        with self._counting:
            number = self._calls
            self._calls += 1
        self._pause(number, "before")
        try:
            return call()
        finally:
            self._pause(number, "after")

    def _pause(self, number: int, moment: str) -> None:
        if self._at == (number, moment):
            self._meanwhile()


@pytest.fixture(scope="module")
def region() -> Iterator[int]:
    with shipped_code(index_every=4) as region:
        yield region


@pytest.fixture(params=["memory", "files"])
def fresh(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Store]:
    # Nobody cuts the power here, and a disk that is asked to be sure ten thousand times takes its time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    roots: list[None] = []

    def make() -> Store:
        roots.append(None)
        if request.param == "memory":
            return MemoryStore(MemoryBucket())
        return PosixStore(tmp_path / str(len(roots)))

    return make


def before(region: int, store: Store) -> None:
    """Some attempts have saved, and left garbage behind."""
    Attempt(0, store, region).run(attempt(5, start=0))
    Attempt(4, store, region).run(attempt(10, last=2, restores=False, start=0))
    store.write(f"{GARBAGE}/__0_0.distcp", [b"a save that was given up"])


def meanwhile(region: int, store: Store) -> Attempt:
    """The next attempt has begun, collected, restored, saved twice and deleted what retention doesn't keep."""
    new = Attempt(2, store, region)
    new.run(attempt(30, 40, collects=True, start=2))
    return new


def objects_of(store: Store) -> Mapping[str, bytes]:
    return {stat.path: store.read(stat.path) for stat in store.list("")}


def check(store: Store) -> Reading:
    objects = objects_of(store)
    reading = read_log(objects)
    for commit in reading.live.values():
        check_data(objects, commit)
    return reading


def paused_at(program: Program, region: int, store: Store, at: tuple[int, str]) -> None:
    """All is well after an old process was held up there."""
    before(region, store)
    new: list[Attempt] = []
    old = Attempt(1, store, region, at=at, meanwhile=lambda: new.append(meanwhile(region, store)))
    old.run(program)
    reading = check(store)
    assert reading.head is not None
    assert reading.bodies[reading.head]["step"] == 40
    assert len(new) == 1
    assert len(new[0].told("committed")) == 2
    for each in (old, *new):
        assert each.told("committed") <= set(reading.commits)
        assert not (each.told("refused") | each.told("voided")) & set(reading.commits)
    # Nothing is in the way of who comes next, who restores what the new attempt saved last.
    last = Attempt(3, store, region)
    last.run(attempt(50, start=3))
    assert len(last.told("committed")) == 1
    (live,) = check(store).live.values()
    assert live["step"] == 50
    there = {
        stat.path.rpartition("/")[0] for stat in store.list("") if not stat.path.startswith(".stepkeeper")
    }
    assert there == {live["folder"]}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", OLD)
def test_an_old_process_is_held_up_at_each_of_its_storage_calls(
    region: int, fresh: Callable[[], Store], name: str, moment: str
) -> None:
    store = fresh()
    before(region, store)
    alone = Attempt(1, store, region)
    n_calls = alone.run(OLD[name].program)
    assert alone.asked >= OLD[name].asks
    for call in range(n_calls):
        try:
            paused_at(OLD[name].program, region, fresh(), (call, moment))
        except Exception as error:
            error.add_note(f"the old process was held up {moment} its storage call {call} of {n_calls}")
            raise
