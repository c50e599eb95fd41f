"""Claims race over one log, with crashes and lost answers at every store call: no interleaving breaks its rules.

Every client runs the shipped code in a thread of its own; a scheduler lets one store call happen at a time and
decides what becomes of it. What is checked afterwards is read from the bytes in the store by an oracle that shares
no code with the log.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from stepkeeper.errors import FencedError, RestoreError, TransientStorageError, UnknownOutcomeError
from stepkeeper.log import Claim, CommitRecord, Entry, Log, LogState, ManifestRef
from stepkeeper.log.state import apply
from stepkeeper.storage.base import ObjectStat, Store
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience

REF: Final = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
IMPATIENT: Final = Patience(total_s=0.2, sleep=lambda _: None)

Choose = Callable[[int], int]
"""A number below the given one."""


class Crash(BaseException):
    """The process is gone."""


@dataclass
class World:
    """The bucket, requests that are still on their way to it, and what each client was told."""

    choose: Choose
    bucket: MemoryBucket = field(default_factory=MemoryBucket)
    late: list[tuple[str, bytes]] = field(default_factory=list)
    committed: dict[str, int] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    voided: set[str] = field(default_factory=set)

    def deliver_one(self) -> None:
        path, data = self.late.pop(self.choose(len(self.late)))
        self.bucket.objects.setdefault(path, data)


class Scheduler:
    """Threads that run one at a time, from one store call to the next."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.turns: list[threading.Semaphore] = []
        self.back = threading.Semaphore(0)
        self.alive: set[int] = set()
        self.errors: list[BaseException] = []

    def start(self, program: Callable[[Callable[[], None]], None]) -> None:
        number = len(self.turns)
        turn = threading.Semaphore(0)
        self.turns.append(turn)
        self.alive.add(number)

        def pause() -> None:
            self.back.release()
            turn.acquire()

        def main() -> None:
            turn.acquire()
            try:
                program(pause)
            except Crash:
                pass
            except BaseException as error:  # kept for the test's own thread
                self.errors.append(error)
            self.alive.discard(number)
            self.back.release()

        threading.Thread(target=main, daemon=True).start()

    def run(self) -> None:
        while self.alive:
            number = sorted(self.alive)[self.choose(len(self.alive))]
            self.turns[number].release()
            self.back.acquire()
        if self.errors:
            raise self.errors[0]


def racing_store(world: World, pause: Callable[[], None]) -> Store:
    """A client of the bucket whose calls wait for their turn, and whose puts are lost, unanswered or late."""
    inner = MemoryStore(world.bucket)

    class Racing:
        uri = "memory://race"

        def put_if_absent(self, path: str, data: bytes) -> bool:
            pause()
            if world.late and world.choose(2):
                world.deliver_one()
            fate = world.choose(9)
            if fate == 0:
                raise TransientStorageError("lost on its way")
            if fate == 1:
                inner.put_if_absent(path, data)
                raise TransientStorageError("applied, the answer was lost")
            if fate == 2:
                world.late.append((path, data))
                raise TransientStorageError("still on its way")
            if fate == 3:
                inner.put_if_absent(path, data)
                raise Crash
            return inner.put_if_absent(path, data)

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            pause()
            if world.choose(12) == 0:
                raise TransientStorageError("no answer")
            return inner.read(path, offset, length)

        def list(self, prefix: str) -> list[ObjectStat]:
            pause()
            return inner.list(prefix)

        def write(self, path: str, parts: object) -> None:
            raise AssertionError("the log writes nothing but slots")

        def delete(self, path: str) -> None:
            raise AssertionError("the log deletes nothing")

        def close(self) -> None:
            """Nothing is open."""

    return Racing()


def persist(operation: Callable[[], Any]) -> Any:
    """Asked again while there is no answer, a few times; then the process gives up."""
    for _ in range(3):
        try:
            return operation()
        except (TransientStorageError, UnknownOutcomeError):
            continue
    raise Crash


class Client:
    """A claim, and some appends; what the log answered is kept in the world."""

    def __init__(self, world: World, pause: Callable[[], None], name: str) -> None:
        self.world = world
        self.name = name
        self.store = racing_store(world, pause)
        self.log = Log(self.store, patience=IMPATIENT)
        self.claim = Claim(slot=0, nonce="")
        self.restarted = False
        """A new process that finds its claim stale learns no more than that."""

    def run(self) -> None:
        try:
            self.claim = self.begin()
            for number in range(self.world.choose(5)):
                match self.world.choose(4):
                    case 0:
                        persist(
                            lambda: self.log.delete(
                                self.claim, lambda state: [r.slot for r in state.line[2:]]
                            )
                        )
                    case 1 if self.log.state.head is not None:
                        persist(partial(self.quarantine_if_live, self.log.state.head))
                    case _:
                        self.commit(f"{self.name}-{number}")
        except FencedError:
            return

    def begin(self) -> Claim:
        try:
            claim: Claim = persist(self.log.begin)
        except RestoreError:
            state = self.log.state
            assert state.head is None
            assert any(record.quarantined for record in state.commits.values())
            claim = persist(partial(self.log.begin, scratch=True))
        return claim

    def quarantine_if_live(self, slot: int) -> None:
        self.log.settle()
        if any(record.slot == slot for record in self.log.state.live):
            self.log.quarantine(self.claim, slot, "a bad block")

    def commit(self, folder: str) -> None:
        try:
            record = self.commit_or_give_up(folder)
        except FencedError:
            if not self.restarted:
                self.world.refused.add(folder)
            raise
        if record is None:
            self.world.voided.add(folder)
        else:
            assert record.folder == folder
            self.world.committed[folder] = record.slot

    def commit_or_give_up(self, folder: str) -> CommitRecord | None:
        try:
            return self.log.commit(self.claim, step=1, folder=folder, size_bytes=1, manifest=REF)
        except UnknownOutcomeError:
            found: CommitRecord | None
            match self.world.choose(3):
                case 0:
                    found = persist(self.log.settle)
                    return found
                case 1:
                    # A new process: it knows the claim and the folder, and nothing else.
                    self.log, self.restarted = Log(self.store, patience=IMPATIENT), True
                    persist(lambda: self.log.resume(self.claim))
                case _:
                    """The same process gives up."""
            found = persist(lambda: self.log.void(self.claim, "too late", folder))
            return found


def run_client(world: World, name: str, pause: Callable[[], None]) -> None:
    Client(world, pause, name).run()


def check(world: World) -> None:
    """What is in the store keeps the rules, and everybody was told the truth about it."""
    paths = sorted(world.bucket.objects)
    assert paths == [f".stepkeeper/log/{slot:08d}.json" for slot in range(len(paths))]
    folders = check_entries([json.loads(world.bucket.objects[path]) for path in paths])
    assert world.committed.items() <= folders.items()
    assert not (world.refused | world.voided) & set(folders)

    whole = LogState()
    for slot, path in enumerate(paths):
        whole = apply(whole, slot, Entry.from_json(world.bucket.objects[path], path))
    assert Log(MemoryStore(world.bucket)).open() == whole


def check_entries(entries: list[Any]) -> dict[str, int]:
    """Folders by slot of their commit, from entries each of which is allowed after those before it."""
    claim: int | None = None
    head: int | None = None
    parents: dict[int, int | None] = {}
    gone: set[int] = set()
    folders: dict[str, int] = {}
    for slot, entry in enumerate(entries):
        if entry["kind"] == "begin":
            claim, head = slot, entry["begin"].get("base")
        assert entry["claim"] == claim, f"slot {slot}: a stale claim wrote"
        if entry["kind"] == "commit":
            body = entry["commit"]
            assert body.get("parent") == head
            assert body["folder"] not in folders
            parents[slot], head, folders[body["folder"]] = head, slot, slot
        elif entry["kind"] == "delete":
            assert not gone & set(entry["delete"]["commits"])
            gone |= set(entry["delete"]["commits"])
        elif entry["kind"] == "void":
            assert entry["void"]["folder"] not in folders
        elif entry["kind"] == "quarantine":
            gone.add(entry["quarantine"]["commit"])
        while head in gone:
            head = parents[head]
        assert entry["after"].get("head") == head
        assert entry["after"]["claim"] == claim
        assert entry["after"]["root"] == entries[0]["nonce"]
    return folders


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=64, max_size=512), st.integers(min_value=2, max_value=3))
def test_no_interleaving_breaks_the_log(choices: bytes, n_clients: int) -> None:
    left = list(choices)

    def choose(n: int) -> int:
        return left.pop() % n if left else n - 1

    world = World(choose)
    scheduler = Scheduler(choose)
    for number in range(n_clients):
        scheduler.start(partial(run_client, world, f"client{number}"))
    # So that short logs have indexes, too, in entries that are no begin.
    with mock.patch("stepkeeper.log.state._INDEX_EVERY", 2):
        scheduler.run()
        while world.late:
            world.deliver_one()
        check(world)
