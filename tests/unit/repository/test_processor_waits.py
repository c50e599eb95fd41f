"""Test what the tests take for time in which other processes had the processors."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processor_waits import ProcessorWaits, delays_s

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel doesn't say how long a thread has waited"
)

SPIN = "import os; os.sched_setaffinity(0, {int(os.environ['CPU'])})\nwhile True: pass"


@pytest.fixture
def rivals() -> Iterator[list[int]]:
    """Two processes that need all of one processor."""
    cpu = str(min(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        started = [
            subprocess.Popen([sys.executable, "-I", "-S", "-c", SPIN], env={"CPU": cpu}) for _ in range(2)
        ]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield [process.pid for process in started]


def test_a_process_that_shares_its_processor_has_waited_about_half_of_the_time(rivals: list[int]) -> None:
    ends_s = time.monotonic() + 60
    while any(sum(delays_s(pid).values()) < 0.1 for pid in rivals):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    with ProcessorWaits(rivals[:1]) as waits:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 1.0:
            time.sleep(0.01)
    assert waits.until_s(began_s - 1) == 0
    assert waits.until_s(time.monotonic()) > 0.2
    assert waits.until_s(began_s + 0.5) < waits.until_s(time.monotonic())


def test_of_a_process_that_is_gone_stays_what_was_seen(rivals: list[int]) -> None:
    with ProcessorWaits(rivals) as waits:
        time.sleep(0.5)
        seen_s = waits.until_s(time.monotonic())
        os.kill(rivals[0], 9)
        time.sleep(0.2)
    assert waits.until_s(time.monotonic()) >= seen_s > 0
    assert delays_s(2**30) == {}
