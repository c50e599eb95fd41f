"""A service in a process of its own, for tests that run beside a cluster."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_S = 20.0


class AdminError(Exception):
    """The side door refuses an action; the message is the service's."""


class RemoteTpu:
    """Reach a service's side door.

    Args:
        address: Where it answers the API, `host:port`.
        admin: The side door, `host:port`.
    """

    def __init__(self, address: str, admin: str) -> None:
        self.address = address
        self.admin = admin

    def do(self, action: str, **arguments: object) -> Any:
        """Call a method of the service's FakeCloud, and return what it returns.

        Raises:
            AdminError: It refuses.
        """
        body = json.dumps(arguments).encode()
        return self._ask(urllib.request.Request(f"http://{self.admin}/v1/{action}", data=body))["result"]

    def state(self) -> Any:
        """Return all queued resources and nodes."""
        return self._look("state")

    def calls(self) -> Any:
        return self._look("calls")

    def counts(self) -> Any:
        """Return how often each method was called."""
        return self._look("counts")

    def hook_runs(self) -> Any:
        return self._look("hook-runs")

    def _look(self, what: str) -> Any:
        return self._ask(urllib.request.Request(f"http://{self.admin}/v1/{what}"))

    def _ask(self, request: urllib.request.Request) -> Any:
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AdminError(json.load(error).get("error", str(error))) from None


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[RemoteTpu]:
    """Run `python -m tpuapi serve` with these arguments while the context lasts.

    Args:
        arguments: Of `serve`.

    Raises:
        RuntimeError: It ended before it answered.
    """
    command = [sys.executable, "-m", "tpuapi", "serve", *arguments]
    roots = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
    # A session of its own: Ctrl-C reaches this program, which then ends it, and it the commands that it runs.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(
                    f"{' '.join(command)} ended with {process.wait(TIMEOUT_S)} before it answered"
                )
            where = json.loads(line)
            yield RemoteTpu(where["address"], where["admin"])
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
