"""A companion is killed before and after each of its storage operations; the next start finds all there."""

import json
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, final

import pytest
from storage_disk.companions import Companions, check_root

from stepkeeper.log import Log
from stepkeeper.log.entries import new_nonce
from stepkeeper.log.tail import LOG_PREFIX
from stepkeeper.retention.garbage import gc
from stepkeeper.storage.base import Buffer, ObjectStat, Store
from stepkeeper.storage.posix import PosixStore

T = TypeVar("T")

pytestmark = pytest.mark.filterwarnings(
    # What is forked here opens files and ends; no thread of the parent's holds anything that it needs.
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


@final
class Deadly:
    """Stores whose process is killed before, or after, one of their operations."""

    def __init__(self, at: tuple[int, str], answers: int) -> None:
        """The operations from 0 on are counted once `armed`. Committed slots are written to `answers`."""
        self.armed = False
        self.n_calls = 0
        self._at = at
        self._answers = answers

    def around(self, rank: int, store: Store) -> "_DeadlyStore":
        return _DeadlyStore(store, self)

    def call(self, operation: Callable[[], T], answered: Callable[[T], int | None]) -> T:
        number = self.n_calls
        self.n_calls += self.armed
        self._kill_at(number, "before")
        try:
            answer = operation()
            slot = answered(answer)
            if slot is not None:
                os.write(self._answers, f"{slot}\n".encode())
            return answer
        finally:
            # Also after one that says that there is no such object.
            self._kill_at(number, "after")

    def _kill_at(self, number: int, moment: str) -> None:
        if self.armed and self._at == (number, moment):
            os.kill(os.getpid(), signal.SIGKILL)


@final
class _DeadlyStore:
    def __init__(self, inner: Store, deadly: Deadly) -> None:
        self._inner = inner
        self._deadly = deadly

    @property
    def uri(self) -> str:
        return self._inner.uri

    def put_if_absent(self, path: str, data: bytes) -> bool:
        commit = path.startswith(LOG_PREFIX) and json.loads(data)["kind"] == "commit"
        slot = int(Path(path).stem) if commit else None
        return self._deadly.call(
            lambda: self._inner.put_if_absent(path, data), lambda won: slot if won else None
        )

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        self._deadly.call(lambda: self._inner.write(path, parts), lambda _: None)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._deadly.call(lambda: self._inner.read(path, offset, length), lambda _: None)

    def list(self, prefix: str) -> list[ObjectStat]:
        return self._deadly.call(lambda: self._inner.list(prefix), lambda _: None)

    def delete(self, path: str) -> None:
        self._deadly.call(lambda: self._inner.delete(path), lambda _: None)

    def close(self) -> None:
        """Nothing is open."""


Program = Callable[[str, Deadly, int], None]
"""What the process does at a root, with so many ranks; it arms the stores where it may be killed from on."""


def saving(uri: str, deadly: Deadly, n_ranks: int) -> None:
    companions = Companions(uri, n_ranks, wrap=deadly.around)
    deadly.armed = True
    companions.begin()
    companions.save(10)


def saving_again(uri: str, deadly: Deadly, n_ranks: int) -> None:
    earlier = Companions(uri, n_ranks, wrap=deadly.around)
    earlier.begin()
    earlier.save(10)
    saving(uri, deadly, n_ranks)


def deleting(uri: str, deadly: Deadly, n_ranks: int) -> None:
    companions = Companions(uri, n_ranks, last=1, wrap=deadly.around)
    companions.begin()
    companions.save(10)
    deadly.armed = True
    companions.save(20)


def collecting(uri: str, deadly: Deadly, n_ranks: int) -> None:
    companions = Companions(uri, n_ranks, wrap=deadly.around)
    companions.begin()
    companions.save(10)
    for rank in range(n_ranks):
        companions.write(companions.order(20, rank, "e" * 32))
    companions.begin()
    store = deadly.around(0, PosixStore(Path(uri.removeprefix("file://"))))
    deadly.armed = True
    assert len(gc(Log(store), store).collected) == 1


PROGRAMS: Final[tuple[Program, ...]] = (saving, saving_again, deleting, collecting)


def ended(act: Callable[[int], None]) -> tuple[int, list[int]]:
    """Do that in a fork, given a pipe, and return how it ended and the numbers that it wrote."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act(writing)
            code = 0
        except BaseException:  # a fork must never get back into pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        numbers = [int(line) for line in stream]
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), numbers


def n_calls_of(program: Program, uri: str, n_ranks: int) -> int:
    def act(answers: int) -> None:
        deadly = Deadly((-1, ""), answers)
        program(uri, deadly, n_ranks)
        os.write(answers, f"{deadly.n_calls}\n".encode())

    code, numbers = ended(act)
    assert code == 0
    return numbers[-1]


def _killed(program: Program, uri: str, at: tuple[int, str], n_ranks: int, answers: int) -> None:
    program(uri, Deadly(at, answers), n_ranks)


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a killed process has written is written.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_killed_at_any_storage_operation(tmp_path: Path, program: Program, n_ranks: int) -> None:
    n_calls = n_calls_of(program, (tmp_path / "whole").as_uri(), n_ranks)
    assert n_calls >= 5
    for at in ((number, moment) for number in range(n_calls) for moment in ("before", "after")):
        root = tmp_path / f"{at[0]}-{at[1]}"
        code, answered = ended(partial(_killed, program, root.as_uri(), at, n_ranks))
        try:
            assert code == -signal.SIGKILL
            check_root(PosixStore(root), committed=max(answered, default=-1), world_size=n_ranks)
        except Exception as error:
            error.add_note(f"killed {at[1]} storage operation {at[0]} of {n_calls}")
            raise


def test_a_rank_killed_at_any_storage_operation_of_its_own(tmp_path: Path) -> None:
    """The others void the save, and the start goes on under its claim: with a companion that follows the lost one."""
    n_killed = 0
    for number, moment in ((number, moment) for number in range(20) for moment in ("before", "after")):
        root = tmp_path / f"{number}-{moment}"
        uri = root.as_uri()
        companions = Companions(uri, 2)
        companions.begin()
        first = companions.save(10)
        nonce = new_nonce()

        def act(
            pipe: int,
            at: tuple[int, str] = (number, moment),
            companions: Companions = companions,
            nonce: str = nonce,
        ) -> None:
            deadly = Deadly(at, pipe)
            session = companions.sessions[1]
            session.shares._store = deadly.around(1, session.shares._store)
            deadly.armed = True
            companions.write(companions.order(20, 1, nonce))

        code, _ = ended(act)
        companions.write(companions.order(20, 0, nonce))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        n_killed += 1
        companions.void(companions.order(20, 0, nonce).folder)
        line = Log(PosixStore(root)).open().line
        assert [record.slot for record in line] == [first.slot]
        again = companions.save(20)
        check_root(PosixStore(root), committed=again.slot, world_size=2)
    assert n_killed >= 4
