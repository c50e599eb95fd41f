"""Test what the time of a training's process is counted as, by a clock that stands still unless it is moved."""

import dataclasses
import subprocess
import sys
import time
from typing import Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.companion.stopwatch import Activity, Stopwatch
from stepkeeper.contract import TimeSpent
from stepkeeper.stacks.pace import mark_stage


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.stopwatch: Final = Stopwatch(5.0, lambda: self.now_s)

    def wait(self, seconds: float) -> Stopwatch:
        self.now_s += seconds
        return self.stopwatch

    def read(self) -> dict[str, int]:
        """Return whole seconds by activity, without zeros."""
        found = dataclasses.asdict(self.stopwatch.read())
        return {name.removesuffix("_millis"): millis // 1000 for name, millis in found.items() if millis}


def test_each_second_of_a_training_is_counted_once() -> None:
    clock = Clock()
    clock.wait(10).switch(Activity.RESTORE)
    assert clock.read() == {"init": 15}, "it counts from the start of the process, 5 s before"
    clock.wait(20).begin_training()
    clock.wait(60).count_step()
    clock.wait(6).count_step()
    assert clock.read() == {"init": 15, "restore": 20, "compile": 66}
    for _ in range(3):
        clock.wait(4).count_step()
    clock.stopwatch.add_stall(2)
    clock.wait(4).count_step()
    clock.wait(3).switch(Activity.SAVE)
    clock.wait(7).add_stall(7)
    assert clock.read() == {"init": 15, "restore": 20, "compile": 66, "train": 17, "save": 9}
    assert sum(clock.read().values()) == 15 + 20 + 66 + 16 + 3 + 7


def test_a_step_that_hangs_is_no_training_and_a_restore_that_hangs_is_seen() -> None:
    clock = Clock()
    clock.wait(1).switch(Activity.RESTORE)
    clock.wait(50)
    assert clock.read() == {"init": 6, "restore": 50}
    clock.stopwatch.begin_training()
    for _ in range(3):
        clock.wait(1).count_step()
    clock.wait(500)
    assert clock.read() == {"init": 6, "restore": 50, "compile": 2, "train": 1}


def test_a_marked_wait_for_data_is_no_training() -> None:
    progress, clock = Progress(lambda state: None), Clock()
    progress._stopwatch = clock.wait(1)
    for _ in range(4):
        with progress.in_stage(mark_stage("data", None)):
            clock.wait(2)
        with progress.in_stage(mark_stage("eval", None)):
            clock.wait(3)
        progress.record_step(1, None)
    assert clock.read() == {"init": 9, "compile": 3, "train": 6, "data": 8}


def test_a_training_that_restores_nothing_has_its_first_step_in_init() -> None:
    clock = Clock()
    for _ in range(4):
        clock.wait(10).count_step()
    assert clock.read() == {"init": 15, "compile": 10, "train": 20}


def test_a_second_restore_is_no_training() -> None:
    clock = Clock()
    for _ in range(3):
        clock.wait(1).count_step()
    clock.stopwatch.switch(Activity.RESTORE)
    clock.wait(30).begin_training()
    for _ in range(3):
        clock.wait(1).count_step()
    assert clock.read() == {"init": 6, "restore": 30, "compile": 3, "train": 2}


def test_states_carry_the_time_that_was_spent() -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    progress.record_restore(None)
    assert told[-1].spent is not None
    assert told[-1].spent.init_millis > 0, "this process did not start just now"
    assert told[-1].spent.train_millis == TimeSpent().train_millis


def test_the_age_of_a_process_is_what_the_kernel_says() -> None:
    code = "from stepkeeper.companion import stopwatch; print(stopwatch.measure_age_s())"
    began_s = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 0 < float(found.stdout) <= time.monotonic() - began_s + 0.02
