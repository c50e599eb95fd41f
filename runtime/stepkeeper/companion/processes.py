"""Start the companion's process, and detect at once that it, or this process's parent, has ended.

The end of a pipe or socket doesn't show that: forked workers may hold copies of both ends. A pidfd does, a descriptor
of one process, which is never another's with the same pid. In a sandbox without pidfds, the pid is used.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stepkeeper.companion.channel import Channel

__all__ = ["ChildProcess", "ParentProcess", "companion_environment", "start_companion", "start_process"]

_LOOK_AGAIN_S: Final = 0.05
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start_process(
    arguments: Sequence[str], env: Mapping[str, str], end: int, end_number: int
) -> "ChildProcess":
    """Start a process that gets its end of a socket as `end_number`, no stdin, and this process's output.

    No pipe reports the start's outcome: workers that are forked meanwhile would inherit it, and block the start until
    they end. The process starts with stop signals blocked, and unblocks them once it ignores them. It has its own
    process group, so signals to this process's group don't reach it. It has to close other inherited files.
    """
    pid = os.posix_spawn(
        arguments[0],
        list(arguments),
        env,
        file_actions=[
            # This comes first: in a trainer without stdin the end may have number 0.
            (os.POSIX_SPAWN_DUP2, end, end_number),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        ],
        setpgroup=0,
        setsigmask=_STOP_SIGNALS,
    )
    return ChildProcess(pid)


class _WatchedProcess:
    """A process with a descriptor that shows its end."""

    def __init__(self, pid: int) -> None:
        self.pid: Final = pid
        self.end_fd = _open_pidfd(pid)
        """Descriptor that is readable once the process has ended; None in a sandbox without pidfd_open."""

        # It isn't closed while a thread waits for it: that thread refers to this object.
        self._close_fd = weakref.finalize(self, _close, self.end_fd)

    def _send(self, number: int) -> None:
        # It may end, or be reaped by other code, right now.
        with suppress(ProcessLookupError):
            if self.end_fd is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self.end_fd, number)


class ChildProcess(_WatchedProcess):
    """A child process. Any thread may use this object."""

    def __init__(self, pid: int) -> None:
        """Watch the child `pid`, which hasn't been reaped yet."""
        super().__init__(pid)
        self._lock = threading.Lock()
        self._has_ended = False
        self.code: int | None = None
        """The exit code, negative for a signal; None until `has_ended`, or if other code reaped it."""

        # Code that runs at the interpreter's exit may still kill it.
        self._close_fd.atexit = False

    def has_ended(self) -> bool:
        """Return whether the process has ended, and reap it if so."""
        with self._lock:
            return self._reap()

    def _reap(self) -> bool:
        if self._has_ended:
            return True
        which = (os.P_PID, self.pid) if self.end_fd is None else (os.P_PIDFD, self.end_fd)
        try:
            result = os.waitid(*which, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # other code has reaped it
            self._has_ended = True
            return True
        if result is not None:
            self._has_ended = True
            self.code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return self._has_ended

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended, for `timeout_s` at most. Return True if it has."""
        ends_s = time.monotonic() + timeout_s
        while not self.has_ended():
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return False
            if self.end_fd is None:
                time.sleep(min(left_s, _LOOK_AGAIN_S))
            else:
                _await_readable(self.end_fd, left_s)
        return True

    def kill(self) -> None:
        """Kill the process, unless it has ended. It ends soon, unless one of its system calls hangs."""
        with self._lock:
            if not self._reap():
                self._send(signal.SIGKILL)

    def forget_after_fork(self) -> None:
        """Close this copy of the descriptor in a forked child: the process is its parent's."""
        self._lock = threading.Lock()
        self._has_ended = True
        self.end_fd = None
        self._close_fd()


class ParentProcess(_WatchedProcess):
    """The process that started this one, which passed its own pid. It may have ended since."""

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if not self.has_ended():
            self._send(number)

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        # If it has, this process has another parent. The pid may be reused by now, so check both.
        return os.getppid() != self.pid or (self.end_fd is not None and _await_readable(self.end_fd, 0.0))


def _open_pidfd(pid: int) -> int | None:
    """Open a descriptor that is readable once the process has ended; None if it's reaped, or in a sandbox."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _await_readable(fd: int, timeout_s: float) -> bool:
    # Not select(): a trainer with a thousand files open has high numbers.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


_END_NUMBERS: Final = (3, 4)
"""Numbers that the process's end of the socket may get: the first that isn't its number in this process."""


def companion_environment() -> dict[str, str]:
    """Return the environment of a companion process: this process's, with its import folders."""
    python_path = os.pathsep.join(filter(None, [*_package_folders(), os.environ.get("PYTHONPATH", "")]))
    # With malloc arenas per thread, it would keep as much freed memory as it needs in all.
    return {**os.environ, "PYTHONPATH": python_path, "MALLOC_ARENA_MAX": "1"}


def start_companion(env: Mapping[str, str]) -> tuple[Channel, ChildProcess]:
    """Start a companion process with `env`, all of its environment, and return this end of its channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = next(number for number in _END_NUMBERS if number != theirs.fileno())
    command = [sys.executable, "-P", "-m", "stepkeeper.companion", str(number), str(os.getpid())]
    with theirs:
        try:
            return Channel(ours), start_process(command, env, theirs.fileno(), number)
        except BaseException:
            ours.close()
            raise


def _package_folders() -> list[str]:
    """List the folders from which the trainer imports the packages."""
    folders = [Path(__file__).parents[2]]
    planners = find_spec("stepkeeper_planners")
    if planners is not None and planners.origin is not None:
        folders.append(Path(planners.origin).parents[1])
    return list(dict.fromkeys(map(str, folders)))
