"""Forks beside the making of descriptors, in real threads and real children."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkeeper import fork_guard
from stepkeeper.fork_guard import forget_in_forks, forks_held_back


def in_child(holds: Callable[[], bool]) -> bool:
    """Fork, and return what `holds` is in the child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if holds() else 1)
    return os.waitpid(pid, 0)[1] == 0


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


class Pipe:
    def __init__(self) -> None:
        self.n_forgotten = 0
        with forks_held_back():
            self.fds = os.pipe()
            forget_in_forks(self)

    def forget_after_fork(self) -> None:
        self.n_forgotten += 1
        for fd in self.fds:
            os.close(fd)

    def is_open(self) -> bool:
        return all(map(is_open, self.fds))


def test_what_has_descriptors_lets_go_of_them_in_a_child_and_only_there() -> None:
    pipe = Pipe()
    assert in_child(lambda: pipe.n_forgotten == 1 and not pipe.is_open())
    assert in_child(lambda: in_child(lambda: pipe.n_forgotten == 1)), (
        "a child's child has nothing to let go of"
    )
    assert pipe.n_forgotten == 0
    assert pipe.is_open()
    for fd in pipe.fds:
        os.close(fd)


def test_no_thread_forks_between_the_making_of_a_descriptor_and_its_being_known() -> None:
    forks, forked = threading.Event(), threading.Event()
    held: list[bool] = []

    def fork() -> None:
        forks.set()
        held.append(in_child(lambda: not is_open(reading)))
        forked.set()

    class Late:
        def forget_after_fork(self) -> None:
            os.close(reading)

    thread = threading.Thread(target=fork)
    owner = Late()
    with forks_held_back():
        reading, writing = os.pipe()
        thread.start()
        forks.wait()
        assert not forked.wait(0.2)
        forget_in_forks(owner)
    thread.join()
    assert held == [True]
    os.close(reading)
    os.close(writing)


def test_who_hangs_while_forks_are_held_back_does_not_hang_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, holds = threading.Event(), threading.Event()

    def hang() -> None:
        with forks_held_back():
            holds.set()
            may_end.wait()

    monkeypatch.setattr(fork_guard, "_PATIENCE_S", 0.05)
    thread = threading.Thread(target=hang)
    thread.start()
    try:
        holds.wait()
        assert in_child(lambda: True)
        with forks_held_back():
            pass
    finally:
        may_end.set()
        thread.join()
    assert in_child(lambda: True)
