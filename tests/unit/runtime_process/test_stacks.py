"""Stacks of a trainer's threads as its companion reads them, and the way between companions."""

import os
import queue
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stepkeeper.fork_guard import MemoryFile
from stepkeeper.links.handshake import listen
from stepkeeper.stacks import reading
from stepkeeper.stacks.dumping import StackDumper
from stepkeeper.stacks.mesh import MeshHost
from stepkeeper.stacks.reading import StackReader
from stepkeeper.stacks.stack_file import stack_file

Said = queue.Queue[tuple[int, dict[str, Any]]]
SECRET = b"s" * 32
PATIENCE_S = 60


@pytest.fixture
def memory() -> Iterator[MemoryFile]:
    file = MemoryFile("stacks")
    yield file
    file.close()


def test_a_trainer_that_does_not_answer_gets_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_ANSWER_S", 0.0)
    file = stack_file()
    number = file.signal_number
    assert number is not None
    reader = StackReader(file.fd, lambda _: None, lambda: os.kill(os.getpid(), number))
    assert "in test_a_trainer_that_does_not_answer_gets_the_signal" in reader.read()


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    said: Said = queue.Queue()
    listener = listen()
    host = MeshHost(listener, SECRET, lambda rank, message: said.put((rank, message)))
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as stranger:
        stranger.sendall(b"x" * 24)
        stranger.settimeout(PATIENCE_S)
        assert stranger.recv(1) == b""
    assert host.send({"ask": "y"}) == 0
    assert said.empty()


class Recorder:
    """The way to other ranks, of which all that is sent can be asked."""

    def __init__(self, n_others: int) -> None:
        self.sent: queue.Queue[dict[str, Any]] = queue.Queue()
        self._n_others = n_others

    def send(self, message: Any) -> int:
        self.sent.put(dict(message))
        return self._n_others


def test_a_dump_that_fails_is_not_the_last(capfd: pytest.CaptureFixture[str]) -> None:
    reports: queue.Queue[str] = queue.Queue()
    failures = [OSError("no memory")]

    def read() -> str:
        if failures:
            raise failures.pop()
        return "mine\n"

    dumper = StackDumper(0, read, least_s=None, on_dumped=reports.put)
    ends_s = time.monotonic() + PATIENCE_S
    while reports.empty() and time.monotonic() < ends_s:
        dumper.ask("it is slow")
    assert reports.get(timeout=0) == "because it is slow\nrank 0:\nmine\n"
    assert "rank 0: no stacks, though it is slow: OSError('no memory')" in capfd.readouterr().err


def test_a_slow_step_of_one_rank_has_all_ranks_dumped() -> None:
    dumper = StackDumper(1, lambda: "mine\n", least_s=1e-9, on_dumped=print)
    mesh = dumper.mesh = Recorder(1)
    for step in range(1, 4):
        dumper.see_step(step)
    assert "nothing has followed step 3" in mesh.sent.get(timeout=PATIENCE_S)["ask"]
    assert mesh.sent.get(timeout=PATIENCE_S) == {"stacks": "mine\n"}
    dumper.see_step(None)
