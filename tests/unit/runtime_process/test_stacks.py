"""When a step is slow, the stacks of all ranks that are logged then, and forks beside descriptors."""

import os
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from stepkeeper.fork_guard import forget_in_forks, forks_held_back
from stepkeeper.stacks import reading as stack_reading
from stepkeeper.stacks.dumping import Pace, StackDumper, shorten_stacks
from stepkeeper.stacks.mesh import MeshHost
from stepkeeper.stacks.reading import StackReader
from stepkeeper.stacks.stack_file import stack_file

PATIENCE_S = 60


def test_a_slow_step_of_one_rank_has_all_ranks_dumped() -> None:
    sent: queue.Queue[dict[str, Any]] = queue.Queue()

    class Others:
        def send(self, message: Any) -> int:
            sent.put(dict(message))
            return 1

    dumper = StackDumper(1, lambda: "mine\n", least_s=1e-9, on_dumped=print)
    dumper.mesh = cast(MeshHost, Others())
    for step in range(1, 4):
        dumper.see_step(step)
    assert "no step has followed step 3" in sent.get(timeout=PATIENCE_S)["ask"]
    assert sent.get(timeout=PATIENCE_S) == {"stacks": "mine\n"}
    dumper.see_step(None)


def in_child(holds: Callable[[], bool]) -> bool:
    """Fork, and return what `holds` is in the child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if holds() else 1)
    return os.waitpid(pid, 0)[1] == 0


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def test_what_has_descriptors_lets_go_of_them_in_a_child_and_only_there() -> None:
    class Pipe:
        n_forgotten = 0

        def forget_after_fork(self) -> None:
            self.n_forgotten += 1
            for fd in fds:
                os.close(fd)

    with forks_held_back():
        pipe, fds = Pipe(), os.pipe()
        forget_in_forks(pipe)
    assert in_child(lambda: pipe.n_forgotten == 1 and not any(map(is_open, fds)))
    assert in_child(lambda: in_child(lambda: pipe.n_forgotten == 1)), "a child's child lets go of nothing"
    assert pipe.n_forgotten == 0
    assert all(map(is_open, fds))
    for fd in fds:
        os.close(fd)


def test_a_trainer_that_does_not_answer_gets_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_reading, "_ANSWER_S", 0.0)
    file = stack_file()
    number = file.signal_number
    assert number is not None
    reader = StackReader(file.fd, lambda _: None, lambda: os.kill(os.getpid(), number))
    assert "in test_a_trainer_that_does_not_answer_gets_the_signal" in reader.read()


def paced(*finished_s: float) -> Pace:
    """Return the pace of steps 1, 2, 3 … which are finished at these times."""
    pace = Pace()
    for step, now_s in enumerate(finished_s, 1):
        pace = pace.see(step, now_s)
    return pace


@pytest.mark.parametrize(
    ("pace", "least_s", "slow_from_s"),
    [
        pytest.param(paced(), 1.0, None, id="no step"),
        pytest.param(paced(5.0), 1.0, None, id="one step"),
        pytest.param(paced(5.0, 6.0), 1.0, None, id="one step was timed"),
        pytest.param(paced(0.0, 2.0, 3.0, 4.0), 1.0, 24.0, id="ten times the longest before it"),
        pytest.param(paced(0.0, 2.0, 3.0), 300.0, 303.0, id="not before the least time"),
        pytest.param(paced(0.0, 1.0, 2.0).note(), 1.0, 22.0, id="noted: after twice the time"),
        pytest.param(paced(0.0, 1.0, 2.0).note().note(), 1.0, 42.0, id="noted twice: after four times"),
        pytest.param(paced(0.0, 1.0, 2.0).note().see(4, 3.0), 1.0, 13.0, id="noted, and a step after that"),
        pytest.param(paced(0.0, 1.0, 2.0).see(3, 99.0), 1.0, 12.0, id="the same step said again"),
        pytest.param(paced(0.0, 1.0, 2.0).see(None, 3.0), 1.0, None, id="between steps"),
        pytest.param(paced(0.0, 1.0, 2.0).see(None, 3.0).see(3, 500.0), 1.0, 510.0, id="and after that"),
    ],
)
def test_a_step_is_slow_from(pace: Pace, least_s: float, slow_from_s: float | None) -> None:
    assert pace.slow_from_s(least_s) == slow_from_s


def test_a_report_has_the_end_of_each_ranks_stacks() -> None:
    stacks = {rank: "x" * 5000 + f"\n  main of {rank}\n" for rank in (1, 0, 2)}
    text = shorten_stacks("nothing moves", stacks, 6000)
    assert len(text) <= 6000
    assert text.startswith("because nothing moves\nrank 0:\n")
    places = [text.index(f"main of {rank}\n") for rank in range(3)]
    assert places == sorted(places)
