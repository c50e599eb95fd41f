"""When a step is slow, the stacks of all ranks that are logged then, and forks beside descriptors."""

import os
import queue
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import pytest

from stepkeeper.contract import Hang, HangLimits, ReportPhase
from stepkeeper.fork_guard import forget_in_forks, forks_held_back
from stepkeeper.stacks import reading as stack_reading
from stepkeeper.stacks.dumping import StackDumper, shorten_stacks
from stepkeeper.stacks.mesh import MeshHost
from stepkeeper.stacks.naming import RankStacks, Source
from stepkeeper.stacks.pace import RESTORE, SAVE, Pace, PaceLimits, Stage, find_stage, mark_stage
from stepkeeper.stacks.reading import StackReader
from stepkeeper.stacks.stack_file import stack_file

PATIENCE_S = 60


class Others:
    """The other ranks' companions, as a connection to them."""

    def __init__(self, answer: Callable[[], None] = lambda: None) -> None:
        self.sent: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answer = answer

    def send(self, message: Any) -> int:
        self.sent.put(dict(message))
        self._answer()
        return 1


def test_a_slow_step_of_one_rank_has_all_ranks_dumped() -> None:
    others, limits = Others(), PaceLimits(least_millis=0)
    mine = RankStacks(text="mine\n", state="S")
    dumper = StackDumper(1, lambda: mine, limits=limits, on_dumped=print, on_hang=print)
    dumper.mesh = cast(MeshHost, others)
    for step in range(1, 4):
        dumper.see(None, step)
    assert "no step has followed step 3" in others.sent.get(timeout=PATIENCE_S)["ask"]
    told = others.sent.get(timeout=PATIENCE_S)
    assert (told["stacks"], told["source"], told["state"]) == ("mine\n", "python", "S")
    dumper.see(SAVE, 3)


HANGING: Final = PaceLimits(least_millis=1, hang=HangLimits(startup_s=3600))


def test_a_hang_is_reported_once_with_the_stacks_of_all_ranks_until_something_moves() -> None:
    hangs: queue.Queue[Hang | None] = queue.Queue()
    other = {"stacks": "theirs\n", "source": "none", "state": "T"}
    others = Others(lambda: dumper.receive(1, other))
    mine = RankStacks(text=LOOP)
    dumper = StackDumper(0, lambda: mine, limits=HANGING, on_dumped=print, on_hang=hangs.put)
    dumper.mesh = cast(MeshHost, others)
    for step in range(1, 4):
        dumper.see(None, step)
    hang = hangs.get(timeout=PATIENCE_S)
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("Stopped", (1,))
    assert re.match(r"because no step has followed step 3 .*\nrank 1:\ntheirs\nrank 0:\n", hang.stacks)
    dumper.see(mark_stage("eval", 600), 3)
    assert hangs.get(timeout=PATIENCE_S) is None
    assert hangs.empty()


def test_a_hang_that_another_rank_noticed_first_is_reported_by_the_stacks_of_that_moment() -> None:
    dumps: queue.Queue[str] = queue.Queue()
    hangs: queue.Queue[Hang | None] = queue.Queue()
    reads: list[int] = []
    now_s = 0.0

    def read() -> RankStacks:
        reads.append(1)
        return RankStacks(text=LOOP)

    dumper = StackDumper(0, read, limits=HANGING, on_dumped=dumps.put, on_hang=hangs.put, clock=lambda: now_s)
    for now_s in (0.0, 1.0, 2.0):
        dumper.see(None, int(now_s))
    now_s = 11.99
    dumper.receive(1, {"ask": "no step has followed step 2"})
    assert dumps.get(timeout=PATIENCE_S).startswith("because no step has followed step 2\n")
    now_s = 13.0
    assert hangs.get(timeout=PATIENCE_S) is not None
    assert len(reads) == 1
    dumper.see(mark_stage("eval", 600), 3)


LOOP: Final = """Thread 0x00007f4c8d7fe6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f4d31a5b080 (most recent call first):
  File "/app/train.py", line 43 in main
  File "/app/train.py", line 50 in <module>
"""


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
    reader = StackReader(file.fd, lambda _: None, lambda: os.kill(os.getpid(), number), lambda: "R")
    found = reader.read()
    assert "in test_a_trainer_that_does_not_answer_gets_the_signal" in found.text
    assert (found.source, found.state) == (Source.SIGNAL, "R")


def test_a_trainer_that_answers_no_signal_has_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_reading, "_ANSWER_S", 0.0)
    monkeypatch.setattr(stack_reading, "_SIGNALLED_S", 0.0)
    found = StackReader(stack_file().fd, lambda _: None, lambda: None, lambda: "T").read()
    assert found == RankStacks(text="", source=Source.NONE, state="T")


def paced(*finished_s: float) -> Pace:
    """Return the pace of steps 1, 2, 3 … which are finished at these times."""
    pace = Pace(stage=None)
    for step, now_s in enumerate(finished_s, 1):
        pace = pace.see(None, step, now_s)
    return pace


EVAL: Final = Stage(name="eval")


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
        pytest.param(
            paced(0.0, 1.0, 2.0).note().see(None, 4, 3.0), 1.0, 13.0, id="noted, and a step after that"
        ),
        pytest.param(paced(0.0, 1.0, 2.0).see(None, 3, 99.0), 1.0, 12.0, id="the same step said again"),
        pytest.param(paced(0.0, 1.0, 2.0).see(EVAL, 3, 3.0), 1.0, None, id="in a stage"),
        pytest.param(
            paced(0.0, 1.0, 2.0).see(EVAL, 3, 3.0).see(None, 3, 500.0), 1.0, 510.0, id="and after it"
        ),
        pytest.param(
            paced(0.0, 1.0, 2.0).see(EVAL, 3, 3.0).see(None, 4, 500.0), 1.0, 510.0, id="a step after a stage"
        ),
    ],
)
def test_a_step_is_slow_from(pace: Pace, least_s: float, slow_from_s: float | None) -> None:
    assert pace.slow_from_s(PaceLimits(least_millis=int(least_s * 1000))) == slow_from_s


@pytest.mark.parametrize(
    ("pace", "after_s", "slow_from_s"),
    [
        pytest.param(Pace(since_s=5.0), None, 3605.0, id="the start"),
        pytest.param(paced(5.0, 6.0), 60, 3606.0, id="the first steps, which compile"),
        pytest.param(paced(0.0, 9.0, 18.0), 60, 78.0, id="a step, exactly"),
        pytest.param(paced(0.0, 9.0, 18.0), None, 318.0, id="a step, by those before it"),
        pytest.param(paced(0.0, 40.0, 80.0), None, 480.0, id="a step, by a long one before it"),
        pytest.param(paced(0.0, 9.0, 18.0).see(RESTORE, 3, 20.0), 60, 3620.0, id="a restore"),
        pytest.param(paced(0.0, 9.0, 18.0).see(SAVE, 3, 20.0), 60, 3620.0, id="a save"),
        pytest.param(paced(0.0, 9.0, 18.0).see(EVAL, 3, 20.0), 60, 3620.0, id="a phase"),
        pytest.param(
            paced(0.0, 9.0, 18.0).see(mark_stage("x", 4.2), 3, 20.0), 60, 25.0, id="a phase's own limit"
        ),
        pytest.param(
            paced(0.0, 9.0, 18.0).see(find_stage(ReportPhase.DONE, None), 3, 20.0), 60, None, id="the end"
        ),
    ],
)
def test_a_training_hangs_from(pace: Pace, after_s: int | None, slow_from_s: float | None) -> None:
    limits = PaceLimits(least_millis=300_000, hang=HangLimits(startup_s=3600, after_s=after_s))
    assert pace.slow_from_s(limits) == slow_from_s


def test_the_innermost_mark_is_the_stage_until_the_end() -> None:
    assert find_stage(ReportPhase.TRAINING, None) is None
    assert find_stage(ReportPhase.TRAINING, EVAL) is EVAL
    assert find_stage(ReportPhase.RESTORING, RESTORE) is RESTORE
    assert find_stage(ReportPhase.SAVING, None) is SAVE
    assert find_stage(ReportPhase.DONE, EVAL) == find_stage(ReportPhase.DONE, None) != EVAL


@pytest.mark.parametrize(
    ("name", "limit_s"), [("", None), ("x" * 65, None), ("a\n", None), ("x", 0), ("x", -1.0)]
)
def test_a_phase_that_can_not_be_is_refused(name: str, limit_s: float | None) -> None:
    with pytest.raises(ValueError, match=r"1 to 64 printable characters|greater than 0"):
        mark_stage(name, limit_s)


def test_a_report_has_the_end_of_each_ranks_stacks() -> None:
    stacks = {rank: "x" * 5000 + f"\n  main of {rank}\n" for rank in (1, 0, 2)}
    text = shorten_stacks("nothing moves", stacks, 6000)
    assert len(text) <= 6000
    assert text.startswith("because nothing moves\nrank 0:\n")
    places = [text.index(f"main of {rank}\n") for rank in range(3)]
    assert places == sorted(places)
