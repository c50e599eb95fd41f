"""Check the machine, run programs on it, and wait for conditions."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stepcluster.errors import CommandError, StartError, UnsupportedMachineError

COMMAND_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 15
PASSING = ("connection refused", "connection reset", "deadline exceeded", "timeout", "timed out", "EOF")
"""What kubectl says of an API server, or that of a webhook, which comes up or has other things to do."""


def require_root() -> None:
    if sys.platform != "linux":
        raise UnsupportedMachineError(
            f"the test cluster runs containers, which needs Linux; this is {sys.platform}"
        )
    if os.geteuid() != 0:
        raise UnsupportedMachineError(
            "the test cluster makes namespaces, cgroups and containers, which needs root: run it again with "
            "sudo --preserve-env=PATH, or point KUBECONFIG at a cluster that is there"
        )


def search_path() -> str:
    """PATH, with the folders that only root's has."""
    return ":".join(
        [os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    )


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    """Run the program, wait until it has ended with success, and return its standard output.

    Raises:
        CommandError: It ended otherwise, or not in time.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            env=env or {**os.environ, "PATH": search_path()},
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(f"{words[0]} is not on this machine: run `python -m stepcluster build`") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"`{' '.join(words)}` did not end within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-4000:]
        raise CommandError(f"`{' '.join(words)}` ended with {done.returncode}: {said}")
    return done.stdout


def is_passing(error: CommandError) -> bool:
    """Return True if kubectl may come through when it is called again."""
    return any(words in str(error) for words in PASSING)


def wait_until(
    is_true: Callable[[], bool], what: str, *, timeout_s: float, log: Path | None = None, poll_s: float = 0.1
) -> None:
    """Wait until `is_true()` returns True.

    Raises:
        StartError: It didn't within `timeout_s`; the message has the tail of `log`.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise StartError(f"{what}: not within {timeout_s:g} s{tail(log)}")
        time.sleep(poll_s)


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def write_json(path: Path, value: object) -> None:
    """Write the file as a whole, for those who read it meanwhile."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.rename(path)


def tail(log: Path | None) -> str:
    """Return the last lines of a log, for the end of a message; empty if there is none."""
    if log is None or not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"; {log} ends with:\n" + "\n".join(lines)


def say(message: str) -> None:
    """Print the message to standard error, where it can't mix with output that programs read."""
    print(message, file=sys.stderr, flush=True)
