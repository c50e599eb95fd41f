"""A process that ends for a reason of its own ends with the code that says so, also if it is told to stop just then."""

import signal
import subprocess
import sys
import time

import pytest

_ENDS_FOR_ANOTHER_REASON = """
import os, signal, time
from stepkeeper.training.notices import signals
from stepkeeper.training.notices.watcher import NoticeWatcher

signals._TIDY_S = 0.5
watcher = NoticeWatcher(None, lambda: None, lambda notice: None)
watcher.start(signals=SIGNALS)
watcher.keep_exit_code(78)
watcher.close()
if GOES_ON:
    other = NoticeWatcher(None, lambda: None, lambda notice: None)
    other.start(signals=True)
    other.close()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(TIDIES_S)
raise SystemExit(78)
"""


@pytest.mark.parametrize(
    ("signals", "goes_on", "tidies_s", "code"),
    [
        (True, False, 0, 78),
        (True, False, 40, 78),
        # What SIGTERM does is the program's matter.
        (False, False, 0, -signal.SIGTERM),
        # The program has caught the exception.
        (True, True, 0, -signal.SIGTERM),
    ],
)
def test_a_process_that_ends_for_another_reason_says_so_also_where_it_is_told_only_then(
    signals: bool, goes_on: bool, tidies_s: int, code: int
) -> None:
    script = _ENDS_FOR_ANOTHER_REASON.replace("SIGNALS", str(signals)).replace("GOES_ON", str(goes_on))
    script = script.replace("TIDIES_S", str(tidies_s))
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], timeout=50, check=False)
    assert ended.returncode == code
    assert time.monotonic() - began_s < 30
