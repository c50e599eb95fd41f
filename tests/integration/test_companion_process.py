"""A companion as a process: when it is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent / "companion_process"


def gone(pid: int, timeout_s: float) -> bool:
    """A zombie, which nobody in this container may reap, is as gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_companion_is_gone_with_its_trainer_though_a_forked_child_has_its_socket() -> None:
    with subprocess.Popen(
        [sys.executable, str(SCRIPTS / "forked.py")], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        said = json.loads(trainer.stdout.readline())
        try:
            assert not gone(said["companion"], 0.3)
            trainer.kill()
            trainer.wait()
            assert gone(said["companion"], 60)
            assert not gone(said["child"], 0.1), "it still has the socket"
        finally:
            trainer.kill()
            os.kill(said["child"], signal.SIGKILL)
