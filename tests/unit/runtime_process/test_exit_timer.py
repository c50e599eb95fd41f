"""Test the timer that ends a process where no thread of Python runs, in processes of their own."""

import subprocess
import sys

import pytest

BEGIN = """
import json, threading, time
from stepkeeper.process_end.exit_timer import ExitTimer

class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(60)
"""


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param("ExitTimer(75, time.monotonic()); time.sleep(60)", 75, id="the time is over already"),
        pytest.param(
            "ExitTimer(75, time.monotonic() + 0.2); json.kept = LongEnd()",
            75,
            id="the interpreter is taken down",
        ),
        pytest.param(
            "timer = ExitTimer(75, time.monotonic() + 60); timer.cancel(); timer.cancel()", 0, id="cancelled"
        ),
        pytest.param("ExitTimer(75, time.monotonic() + 60)", 0, id="it ends before by itself"),
    ],
)
def test_the_process_ends_with_the_code_unless_it_is_cancelled(script: str, code: int) -> None:
    process = subprocess.run([sys.executable, "-c", BEGIN + script], timeout=200, check=False)
    assert process.returncode == code
