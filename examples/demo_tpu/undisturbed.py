"""Run the same training in one process on this machine, without any fault."""

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from demo.director import DemoError

__all__ = ["UndisturbedRun"]

_STEP = re.compile(r"step=(\d+) .* exact=(\S+)$")
_LAST_LINES = 20


class UndisturbedRun:
    """An undisturbed run. It begins with its block, and is killed at the block's end if it still runs.

    Args:
        folder: Where it saves.
        n_steps: How long it trains.

    """

    def __init__(self, folder: Path, n_steps: int) -> None:
        uri = (folder / "undisturbed").as_uri()
        self._command = [sys.executable, "-m", "text_lm", "--steps", str(n_steps), "--checkpoint-uri", uri]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # A session of its own: Ctrl-C reaches this program, which then ends it.
        self._process = subprocess.Popen(
            self._command,
            env=os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self

    def losses(self, *, each: Callable[[int], None] = lambda _: None) -> dict[int, str]:
        """Wait for its end, and return the loss of each step, to its last bit.

        Args:
            each: Called with each step that it does.

        Raises:
            DemoError: It failed; the message has its last lines.

        """
        assert self._process is not None
        assert self._process.stdout is not None
        losses: dict[int, str] = {}
        last: deque[str] = deque(maxlen=_LAST_LINES)
        with self._process.stdout as lines:
            for line in lines:
                last.append(line)
                if found := _STEP.match(line):
                    losses[int(found[1])] = found[2]
                    each(int(found[1]))
        if self._process.wait() != 0:
            lines_at_end = "".join(last)
            raise DemoError(f"the undisturbed run ended with {self._process.returncode}: {lines_at_end}")
        return losses

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
