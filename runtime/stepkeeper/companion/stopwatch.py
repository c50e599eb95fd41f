"""Measure what the time of a training's process is spent on."""

import os
import time
from collections.abc import Callable
from enum import StrEnum

from stepkeeper.contract import TimeSpent
from stepkeeper.kernel_record import KernelRecord

__all__ = ["Activity", "Stopwatch", "measure_age_s"]


class Activity(StrEnum):
    """The train thread's work. The values are the names of TimeSpent's fields without the unit."""

    INIT = "init"
    RESTORE = "restore"
    COMPILE = "compile"
    TRAIN = "train"
    SAVE = "save"
    DATA = "data"


class Stopwatch:
    """Divide the time of this process among activities. Only the train thread switches between them."""

    def __init__(self, age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start in activity INIT, which has lasted since the start of the process, `age_s` seconds ago."""
        self._clock = clock
        self._activity = Activity.INIT
        self._since_s = clock() - age_s
        self._spent_s = dict.fromkeys(Activity, 0.0)
        self._stalls_s = 0.0
        self._has_step = False
        """True once a step has finished since COMPILE began."""

    def switch(self, activity: Activity) -> Activity:
        """End the present activity, and begin another one. Return the one that has ended."""
        now_s, ended = self._clock(), self._activity
        self._spent_s[ended] += now_s - self._since_s
        self._activity, self._since_s = activity, now_s
        return ended

    def count_step(self) -> None:
        """Count the time of a finished step. The first one ends INIT or RESTORE, and the second one COMPILE."""
        compiles = self._activity in {Activity.INIT, Activity.RESTORE}
        compiled = self._activity is Activity.COMPILE and self._has_step
        self._has_step = True
        self.switch(Activity.COMPILE if compiles else Activity.TRAIN if compiled else self._activity)

    def begin_training(self) -> None:
        """Begin the steps after a restore, of which the first two compile."""
        self._has_step = False
        self.switch(Activity.COMPILE)

    def add_stall(self, stall_s: float) -> None:
        """Count seconds between steps as spent on a save. One thread calls this, not always the train thread."""
        if self._activity is not Activity.SAVE:
            self._stalls_s += stall_s

    def read(self) -> TimeSpent:
        """Return the time spent. Steps count once they are finished: a step that hangs is no training."""
        spent_s, stalls_s = dict(self._spent_s), self._stalls_s
        if self._activity is not Activity.TRAIN:
            spent_s[self._activity] += self._clock() - self._since_s
        moved_s = min(stalls_s, spent_s[Activity.TRAIN])
        spent_s[Activity.SAVE] += moved_s
        spent_s[Activity.TRAIN] -= moved_s
        return TimeSpent(
            **{f"{activity}_millis": max(0, int(spent_s[activity] * 1000)) for activity in Activity}
        )


def measure_age_s() -> float:
    """Measure the seconds since this process started; 0 if the kernel doesn't report its start."""
    started = KernelRecord(os.getpid()).started
    if started is None:
        return 0.0
    since_boot_s = int(started) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
