"""Run the companion process, which writes, deletes and reports for one trainer, and ends when the trainer does.

The trainer starts it with: python -m stepkeeper.companion <socket's file descriptor> <trainer's pid>
"""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepkeeper.companion.channel import Channel, Outbox
from stepkeeper.companion.processes import ParentProcess
from stepkeeper.companion.server import Server
from stepkeeper.kernel_record import KernelRecord

_SOCKET_GONE: Final = 0
_STDERR: Final = 2
_FIRST: Final = 1


def serve(socket_fd: int, trainer_pid: int) -> None:
    """Answer requests until the trainer closes the socket or is dead, then end this process at once.

    Work that isn't finished by then never will be: a commit that isn't in the log is no commit. For a trainer that a
    signal has ended, its companion writes the termination message.
    """
    channel = Channel(socket.socket(fileno=socket_fd))
    # The socket alone doesn't tell: a worker that the trainer has forked may hold the other end, and outlive it.
    trainer, record = ParentProcess(trainer_pid), KernelRecord(trainer_pid)
    server = Server(Outbox(channel), trainer.send_signal)
    threading.Thread(target=server.run_forever, name="requests", daemon=True).start()
    while (packet := channel.receive(trainer)) is not None:
        server.receive_packet(packet)
    # The kubelet tells itself how the first process of a container ended, and then adds the end of the log.
    if trainer_pid != _FIRST and (number := record.read_end_signal()) is not None:
        server.write_message_of_killed(number)
    os._exit(_SOCKET_GONE)


def close_inherited(socket_fd: int) -> None:
    """Close every file that the trainer had open for its children, such as a pipe whose end somebody waits for.

    What has come through an exec is inheritable. What this interpreter has opened by itself, in sitecustomize for
    instance, is not (PEP 446), and stays open.
    """
    for fd in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if fd > _STDERR and fd != socket_fd:
            with suppress(OSError):  # that of the listing, which is closed by now
                if os.get_inheritable(fd):
                    os.close(fd)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # The trainer handles the end of the pod; the companion ends after it.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    close_inherited(int(sys.argv[1]))
    serve(socket_fd=int(sys.argv[1]), trainer_pid=int(sys.argv[2]))
