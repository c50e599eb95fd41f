"""Run the companion process, which writes, deletes and reports for one trainer, and ends when the trainer does.

The trainer starts it with: python -m stepkeeper.companion <socket's file descriptor> <trainer's pid>
"""

import os
import select
import signal
import socket
import sys
import threading
from typing import Final

from stepkeeper.companion.channel import Channel
from stepkeeper.companion.server import Server

_SOCKET_GONE: Final = 0


def serve(socket_fd: int, trainer_pid: int) -> None:
    """Answer requests until the trainer closes the socket or is dead, then end this process at once.

    Work that isn't finished by then never will be: a commit that isn't in the log is no commit.
    """
    end = socket.socket(fileno=socket_fd)
    channel = Channel(end)
    server = Server(channel)
    threading.Thread(target=server.run_forever, name="requests", daemon=True).start()
    trainer_fd = _open_pidfd(trainer_pid)
    # Not select(): the socket may have a high number, from a trainer with a thousand files open.
    watched = select.poll()
    for fd in (end.fileno(),) if trainer_fd is None else (end.fileno(), trainer_fd):
        watched.register(fd, select.POLLIN)
    while True:
        if end.fileno() not in {fd for fd, _ in watched.poll()}:
            # The trainer is dead, though a forked child of it still holds the socket.
            break
        packet = channel.receive()
        if packet is None:
            break
        server.receive_packet(packet)
    os._exit(_SOCKET_GONE)


def _open_pidfd(pid: int) -> int | None:
    """Open a descriptor that tells when the trainer is dead; None in a sandbox that lacks the call."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(_SOCKET_GONE)
    except OSError:
        # In a sandbox without this call, only the socket tells that the trainer is gone.
        return None


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # The trainer handles the end of the pod; the companion ends after it.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    serve(socket_fd=int(sys.argv[1]), trainer_pid=int(sys.argv[2]))
