"""Run fake-gcs-server as a process with one empty bucket."""

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

BUCKET: Final = "checkpoints"
_START_TIMEOUT_S: Final = 20.0


@contextmanager
def fake_gcs_server(program: str, folder: Path) -> Iterator[str]:
    """Serve a bucket named BUCKET, kept in memory.

    Args:
        program: Path of the fake-gcs-server executable.
        folder: A folder for the server's log.

    Yields:
        The server's address. Give it to clients as STORAGE_EMULATOR_HOST.

    Raises:
        RuntimeError: The server doesn't start; the message has the end of its log.

    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    options += ["-external-url", address, "-public-host", f"127.0.0.1:{port}", "-log-level", "warn"]
    log = folder / "fake-gcs-server.log"
    with log.open("wb") as output:
        process = subprocess.Popen([program, *options], stdout=output, stderr=output, cwd=folder)
    try:
        _make_bucket(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=10)


def _make_bucket(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(  # http://127.0.0.1, from above
        f"{address}/storage/v1/b?project=test",
        data=json.dumps({"name": BUCKET}).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            opener.open(request, timeout=5).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                end = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"fake-gcs-server didn't start ({error}): {end}") from error
            time.sleep(0.05)
