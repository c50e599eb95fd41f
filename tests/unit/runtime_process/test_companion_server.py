"""What a companion does for a trainer: a save never waits for what comes after the commits before it."""

import errno
import os
import queue
import secrets
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, final

import pytest

from stepkeeper.checkpoint.orders import ValueOrder
from stepkeeper.companion import upkeep
from stepkeeper.companion.channel import Packet
from stepkeeper.companion.messages import ClaimRequest, CloseRequest, CommitRequest, Kind, OpenRequest
from stepkeeper.companion.server import Server
from stepkeeper.companion.session import Session
from stepkeeper.contract.wire import encode
from stepkeeper.errors import StorageError
from stepkeeper.log import Log
from stepkeeper.policy.keep import Keep, LastN
from stepkeeper.storage.moved import moved
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import save_order, write_request
from stepkeeper_testing.hooks import at
from stepkeeper_testing.memory import MemoryStore, Operation, named_bucket

Predicate = Callable[[Operation, str], bool]


@final
class Answers:
    """In an outbox's place: what was answered, by the number of the request."""

    def __init__(self) -> None:
        self.by_id: dict[int, dict[str, Any]] = {}
        self.complaint: str | None = None
        self.upkept: list[int] = []

    def send(self, message: dict[str, Any]) -> None:
        if "complaint" in message:
            self.complaint = message["complaint"]
        elif "upkept" in message:
            self.upkept.append(message["upkept"])
        else:
            self.by_id[message["id"]] = message


@final
class Trainer:
    """Asks a companion's server, and gives it its turns."""

    def __init__(self) -> None:
        uri = f"memory://{secrets.token_hex(4)}"
        self.bucket = named_bucket(uri.removeprefix("memory://"))
        self.answers = Answers()
        self.server = Server(self.answers)  # type: ignore[arg-type]  # what a server needs of an outbox
        self.n_asked = 0
        self.nonces: dict[int, str] = {}
        keep = Keep(last=(LastN(1),))
        self.body(self.ask(Kind.OPEN, OpenRequest(rank=0, world_size=1, uri=uri, keep=keep)))
        self.claim = int(self.body(self.ask(Kind.CLAIM, ClaimRequest()))["claim"]["slot"])

    @property
    def store(self) -> MemoryStore:
        store = self.session._store
        assert isinstance(store, MemoryStore)
        return store

    @property
    def session(self) -> Session:
        assert self.server._session is not None
        return self.server._session

    def ask(self, kind: Kind, body: object = None, fds: tuple[int, ...] = ()) -> int:
        self.n_asked += 1
        raw = {} if body is None else encode(body)
        self.server.receive_packet(
            Packet(message={"id": self.n_asked, "kind": str(kind), "body": raw}, fds=fds)
        )
        return self.n_asked

    def write(self, step: int) -> int:
        self.nonces[step] = secrets.token_hex(16)
        note = ValueOrder(fqn="note", start=0, length_bytes=4)
        order = save_order(
            [], [note], rank=0, world_size=1, step=step, claim=self.claim, nonce=self.nonces[step]
        )
        region = os.memfd_create("region")
        os.write(region, b"note")
        return self.ask(Kind.WRITE, write_request(order), (region,))

    def commit(self, step: int) -> int:
        folder = f"{step}/{self.claim}-{self.nonces[step]}"
        return self.ask(Kind.COMMIT, CommitRequest(folder=folder, others=(), duration_millis=1))

    def save(self, step: int) -> None:
        self.body(self.write(step))
        self.body(self.commit(step))

    def body(self, number: int) -> dict[str, Any]:
        """Return the answer's body; it comes if the server gets its turns."""
        while number not in self.answers.by_id:
            self.server.run_once()
        body: dict[str, Any] = self.answers.by_id[number]["body"]
        return body

    def finish(self) -> None:
        """All that comes after commits is done."""
        while self.server._tasks.n_tasks:
            self.server.run_once()

    @property
    def steps(self) -> list[int]:
        paths = (path for path in self.bucket.objects if not path.startswith(".stepkeeper"))
        return sorted({int(path.partition("/")[0]) for path in paths})


@final
class Block:
    """Holds up the first call of a kind, until it is released."""

    def __init__(self, trainer: Trainer, which: Predicate, *meanwhile: Callable[[], int]) -> None:
        """`meanwhile` is asked of the companion when the call has come, in the thread that makes it."""
        self._trainer = trainer
        self._which = which
        self._meanwhile = meanwhile
        self._came = threading.Event()
        self.over = False
        """Has it waited in vain? Who is to be answered meanwhile was not."""

        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.released = threading.Event()
        trainer.store.hook = self._hook

    def _hook(self, moment: str, operation: Operation, path: str) -> None:
        if moment == "before" and self._which(operation, path) and not self._came.is_set():
            self._came.set()
            for ask in self._meanwhile:
                self._asked.put(ask())
            self.over = not self.released.wait(60)

    def asked(self) -> list[int]:
        """The call has come, and so have the requests."""
        while not self._came.is_set():
            self._trainer.server.run_once()
        return [self._asked.get(timeout=60) for _ in self._meanwhile]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def of_data(operation: str, path: str) -> bool:
    return operation == "delete" and path.startswith("10/")


HELD_UP: dict[str, Predicate] = {
    "verification": lambda operation, path: operation == "list" and path.startswith("20/"),
    "pins": lambda operation, path: operation == "list" and path.endswith("/pins/"),
    "deletion": of_data,
    "collection": lambda operation, path: operation == "list" and path == "",
}


@pytest.mark.parametrize("what", HELD_UP)
def test_saves_go_before_what_comes_after_commits(trainer: Trainer, what: str) -> None:
    trainer.session._upkeep._has_collected = True
    trainer.save(10)
    trainer.finish()
    trainer.session._upkeep._has_collected = False
    block = Block(trainer, HELD_UP[what], lambda: trainer.write(30))
    trainer.save(20)
    (write,) = block.asked()
    trainer.body(write)
    trainer.body(trainer.commit(30))
    trainer.save(40)
    assert not block.over
    assert {20, 30, 40} <= set(trainer.steps)
    assert Log(MemoryStore(trainer.bucket)).open().line[0].step == 40
    block.released.set()
    trainer.finish()
    assert trainer.session._upkeep.complaint is None
    assert trainer.steps == [40]
    assert trainer.session._upkeep._folders.keys() == {
        record.slot for record in Log(MemoryStore(trainer.bucket)).open().live
    }


def test_the_newest_verified_commit_stays_until_a_later_one_is_verified(trainer: Trainer) -> None:
    """Also where that has been committed for long."""
    trainer.save(10)
    trainer.finish()
    there: list[list[int]] = []

    def verifies_30(operation: Operation, path: str) -> bool:
        if operation == "list" and path.startswith("30/"):
            there.append(trainer.steps)
        return False

    block = Block(
        trainer,
        lambda operation, path: verifies_30(operation, path) or HELD_UP["verification"](operation, path),
        lambda: trainer.write(30),
    )
    trainer.save(20)
    (write,) = block.asked()
    trainer.body(write)
    trainer.body(trainer.commit(30))
    assert trainer.steps == [10, 20, 30]
    block.released.set()
    trainer.finish()
    assert there == [[20, 30]]
    assert trainer.steps == [30]


def test_who_restores_waits_for_the_deletion_and_a_save_that_comes_later_does_not(trainer: Trainer) -> None:
    trainer.save(10)
    trainer.finish()
    block = Block(trainer, of_data, lambda: trainer.ask(Kind.REFRESH), lambda: trainer.write(30))
    trainer.save(20)
    refresh, write = block.asked()
    trainer.body(write)
    assert refresh not in trainer.answers.by_id
    assert trainer.answers.upkept == [1], "the trainer isn't told before it is done"
    block.released.set()
    assert trainer.body(refresh)["base"]["step"] == 20
    assert trainer.answers.upkept == [1, 2]
    assert trainer.steps == [20, 30], "30 is written, and isn't committed"
    assert trainer.server._tasks.n_tasks == 0


def test_a_companion_that_is_closed_leaves_what_takes_too_long_to_the_next_start(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.save(10)
    trainer.finish()
    block = Block(trainer, of_data)
    trainer.save(20)
    trainer.body(trainer.ask(Kind.CLOSE, CloseRequest(within_millis=50)))
    assert capsys.readouterr().err == (
        "stepkeeper: closed before all deletions were done: the first save of the next start does the rest\n"
    )
    assert trainer.steps == [10, 20]
    block.released.set()
    trainer.finish()


def test_a_save_that_finds_no_room_waits_for_deletion_that_it_went_before(trainer: Trainer) -> None:
    trainer.save(10)
    trainer.finish()
    trainer.save(20)
    refused: list[int] = []

    def refuse() -> None:
        if 10 in trainer.steps:
            refused.append(10)
            raise StorageError(errno.ENOSPC, "no space left on device")

    trainer.store.hook = at("before write", refuse)
    before = moved.n_bytes
    trainer.save(30)
    assert refused == [10]
    assert moved.n_bytes > before, "a deletion that a save waits for would pass for a companion that is stuck"
    trainer.finish()
    assert trainer.steps == [30]


@pytest.mark.parametrize("its_commit_is_deleted", [False, True])
def test_a_stale_companion_that_was_held_up_deletes_nothing_of_a_later_claim(
    trainer: Trainer, its_commit_is_deleted: bool
) -> None:
    trainer.save(10)
    trainer.finish()

    def meanwhile() -> int:
        for path in [*trainer.bucket.objects]:
            if its_commit_is_deleted and path.startswith("20/"):
                del trainer.bucket.objects[path]
        slot = Log(MemoryStore(trainer.bucket)).begin().slot
        block.released.set()
        return slot

    trainer.session._upkeep._patience = Patience(sleep=lambda _: None)
    block = Block(trainer, HELD_UP["verification"], meanwhile)
    trainer.save(20)
    trainer.finish()
    assert "FencedError" in str(trainer.answers.complaint), "nothing is damaged"
    assert trainer.answers.upkept == [1, 2], "an end with an error is one, too"
    assert trainer.steps == ([10] if its_commit_is_deleted else [10, 20])


def test_what_goes_wrong_after_a_commit_is_said_and_ends_nothing(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[str | None] = []
    reporter = SimpleNamespace(update_log=lambda log, commit=None: reported.append(log.error))
    monkeypatch.setattr(trainer.session, "reporter", reporter)

    def broken(*args: object, **options: object) -> None:
        raise ValueError("an odd name")

    said = "after the commit of step 1: ValueError('an odd name')"
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "collect", broken)
        trainer.save(1)
        trainer.finish()
    assert (reported[-1], trainer.answers.complaint) == (said, said)
    assert "ValueError: an odd name" in capsys.readouterr().err
    trainer.save(2)
    trainer.finish()
    assert (reported[-1], trainer.answers.complaint) == (None, None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("operation", ["put_if_absent", "list", "delete"])
def test_a_deletion_cut_short_is_taken_up_after_the_next_save(trainer: Trainer, operation: Operation) -> None:
    trainer.save(10)
    trainer.finish()
    deleting = False

    def hook(moment: str, asked: Operation, path: str) -> None:
        nonlocal deleting
        deleting = deleting or (
            asked == "put_if_absent" and b'"delete"' in trainer.bucket.objects.get(path, b"")
        )
        if moment == "after" and asked == operation and deleting:
            raise StorageError("no permission")

    trainer.store.hook = hook
    trainer.save(20)
    trainer.finish()
    assert trainer.session._upkeep.complaint is not None
    assert trainer.steps[-1] == 20
    trainer.store.hook = None
    trainer.save(30)
    trainer.finish()
    assert trainer.session._upkeep.complaint is None
    assert trainer.steps == [30]
