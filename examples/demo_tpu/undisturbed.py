"""The same training in one process on this machine, which nothing happens to."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from demo.director import DemoError

__all__ = ["UndisturbedRun"]


class UndisturbedRun:
    """Begins with its block, and is killed at the block's end if it still goes on.

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

    def losses(self) -> dict[int, str]:
        """Wait for its end, and return the loss of each step, to its last bit.

        Raises:
            DemoError: It failed; the message has what it said last.

        """
        assert self._process is not None
        assert self._process.stdout is not None
        output = self._process.stdout.read()
        if self._process.wait() != 0:
            raise DemoError(f"the undisturbed run ended with {self._process.returncode}: {output[-2000:]}")
        found = re.findall(r"^step=(\d+) .* exact=(\S+)$", output, re.MULTILINE)
        return {int(step): exact for step, exact in found}

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
