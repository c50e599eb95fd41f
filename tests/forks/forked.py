"""Import modules, then fork a process for each script that a ForkServer asks for: python forked.py FD MODULE…"""

import gc
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

IMPORTED: Final[dict[str, tuple[str | None, str]]] = {}
"""By environment variable that an import has set: its value before and after. torch_xla sets XLA_FLAGS for example."""


def import_all(names: Sequence[str]) -> None:
    """Import the modules, and note the environment variables that they set.

    What they have made is left out of garbage collections: the last one of each process would look at all of it, which
    takes most of a second of a core. Triton's is not: its bindings report what isn't collected as leaked.
    """
    before = dict(os.environ)
    for name in names:
        import_module(name)
        if "triton" not in sys.modules:
            gc.freeze()
    for name, value in os.environ.items():
        if before.get(name) != value:
            IMPORTED[name] = (before.get(name), value)


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each request, until the other end is closed. Only the forked processes return, each with its request."""
    # Ctrl-C is for the tests to handle. Nobody waits for the guards.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            os._exit(0)
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        control.close()
        *streams, news = fds
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if pid := os.fork():
            guard(pid, streams, news)
        os.close(news)
        request: dict[str, Any] = json.loads(message)
        become(request, streams)
        return request


def guard(pid: int, streams: list[int], news: int) -> NoReturn:
    """Report the process's id, and how it has ended once it has."""
    for fd in {0, 1, 2, *streams}:
        os.close(fd)
    try:
        os.write(news, struct.pack("q", pid))
        _, status = os.waitpid(pid, 0)
        os.write(news, struct.pack("q", os.waitstatus_to_exitcode(status)))
    finally:
        os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Take over everything that a process is started with."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in set(streams):
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for name, (before, after) in IMPORTED.items():
        wanted, value = os.environ.get(name), after
        if wanted not in (before, after):
            if name != "XLA_FLAGS":
                sys.exit(
                    f"{name} is set by what was imported: it has to be in the environment of the ForkServer"
                )
            # XLA reads its flags when the first device is made, so a process may have some that its server hasn't.
            value = f"{wanted or ''} {after.removeprefix(before or '').strip()}"
        os.environ[name] = value
    sys.argv = request["argv"]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)


if __name__ == "__main__":
    import_all(sys.argv[2:])
    __file__ = serve(socket.socket(fileno=int(sys.argv[1])))["argv"][0]
    # In this module's own namespace: the script is __main__, for pickle too, and for the processes that it starts.
    exec(compile(Path(__file__).read_bytes(), __file__, "exec", dont_inherit=True))
