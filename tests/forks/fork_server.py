"""Start Python scripts as processes forked from one that has imported torch, and torch_xla, already.

Importing torch takes 2 s of a core and torch_xla 5 s, and the tests here start hundreds of processes. A fork server has
imported these libraries and done nothing else: it made no device, runs no thread, and knows nothing of the code under
test. A forked process has its own environment, arguments and `__main__`, and ends as an interpreter does.
"""

import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final

_FORKED: Final = Path(__file__).with_name("forked.py")
_NUMBER: Final = struct.Struct("q")
_PIPE_BYTES: Final = 1 << 20

TORCH: Final = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo")
"""What the tests' scripts import of torch, and what torch itself imports only when it is used."""

Stream = int | IO[str] | None
"""A file, subprocess.PIPE or subprocess.DEVNULL, for stderr subprocess.STDOUT too; None: that of this process."""


class ForkServer:
    """A process that has imported `modules` and forks others on demand.

    It adds `env` to its environment, and to that of a process which is started without one. All its processes have one
    seed of `hash()`: ranks, which must not depend on the order of a set's elements, should come from two servers.
    """

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._env = dict(env or {})
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_FORKED), str(theirs.fileno()), *modules],
                # OpenBLAS would start threads when numpy is imported, which no forked process would have.
                env={**os.environ, **self._env, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def start(
        self,
        command: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> "ForkedProcess":
        """Start the script `command[0]` with the arguments that follow it."""
        argv = [str(part) for part in command]
        request = {
            "argv": argv,
            "env": {**os.environ, **self._env} if env is None else dict(env),
            "cwd": str(cwd or Path.cwd()),
        }
        with ExitStack() as theirs:
            to_it, written = _connect(theirs, 0, stdin)
            from_it, read = _connect(theirs, 1, stdout)
            errors = from_it if stderr == subprocess.STDOUT else _connect(theirs, 2, stderr)[0]
            news, told = os.pipe()
            theirs.callback(os.close, told)
            socket.send_fds(self._control, [json.dumps(request).encode()], [to_it, from_it, errors, told])
        return ForkedProcess(argv, news, written, read)

    def run(
        self,
        command: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Start the script and wait for its end, as subprocess.run does with capture_output=True."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = self.start(
                command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            for file in (output, errors):
                file.seek(0)
            return subprocess.CompletedProcess(process.args, code, output.read(), errors.read())

    def close(self) -> None:
        """End the server. What it has forked is not touched."""
        self._control.close()
        self._process.wait()


def _connect(theirs: ExitStack, number: int, stream: Stream) -> tuple[int, IO[str] | None]:
    """Return what a new process gets as its stream `number`, and this process's end of it where it is a pipe."""
    if stream is None:
        return number, None
    if stream == subprocess.PIPE:
        reading, writing = os.pipe()
        with suppress(OSError):
            # A process that says much goes on although nobody reads it for a while.
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        end, ours, mode = (reading, writing, "w") if number == 0 else (writing, reading, "r")
        theirs.callback(os.close, end)
        return end, os.fdopen(ours, mode)
    if stream == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, null)
        return null, None
    return stream if isinstance(stream, int) else stream.fileno(), None


class ForkedProcess:
    """A process of a ForkServer, with those methods of subprocess.Popen (in text mode) that the tests need."""

    def __init__(self, args: Sequence[str], news: int, stdin: IO[str] | None, stdout: IO[str] | None) -> None:
        self.args, self.stdin, self.stdout = args, stdin, stdout
        self.returncode: int | None = None
        self._news = news
        self.pid = self._hear()

    def _hear(self) -> int:
        message = os.read(self._news, _NUMBER.size)
        if len(message) < _NUMBER.size:
            raise ChildProcessError(
                f"{self.args}: its fork server or its guard is gone; nobody knows how it ended"
            )
        (number,) = _NUMBER.unpack(message)
        return int(number)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._news], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._hear()
            os.close(self._news)
        return self.returncode

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Close its input, read all of its output, and wait for its end. A second call reads nothing."""
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                self.stdin.close()
        output = ""
        if self.stdout is not None and not self.stdout.closed:
            with self.stdout:
                output = self.stdout.read()
        self.wait(timeout)
        return output, None
