"""Run the companion process, which writes, deletes and reports for one trainer, and ends with it.

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
_FIRST_PID: Final = 1


def serve(socket_fd: int, trainer_pid: int) -> None:
    """Answer requests until the trainer closes the socket or has died, then end this process at once.

    Unfinished work is dropped: only commits in the log count. If a signal killed the trainer, this writes the trainer's
    termination message.
    """
    channel = Channel(socket.socket(fileno=socket_fd))
    # The socket alone isn't enough: a forked worker may hold the other end, and outlive the trainer.
    trainer, record = ParentProcess(trainer_pid), KernelRecord(trainer_pid)
    server = Server(Outbox(channel), trainer.send_signal)
    threading.Thread(target=server.run_forever, name="requests", daemon=True).start()
    while (packet := channel.receive(trainer)) is not None:
        server.receive_packet(packet)
    # For a container's first process the kubelet reports the signal itself, and adds the end of the log.
    if trainer_pid != _FIRST_PID and (number := record.read_end_signal()) is not None:
        server.write_message_of_killed(number)
    os._exit(_SOCKET_GONE)


def close_inherited(socket_fd: int) -> None:
    """Close all inherited files, such as a pipe whose end another process waits for.

    Descriptors that came through exec are inheritable; those that sitecustomize, for instance, has opened
    aren't (PEP 446).
    """
    for fd in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if fd > _STDERR and fd != socket_fd:
            with suppress(OSError):  # the listing's own descriptor is closed by now
                if os.get_inheritable(fd):
                    os.close(fd)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # The trainer handles the end of the pod; the companion ends after it.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    close_inherited(int(sys.argv[1]))
    serve(socket_fd=int(sys.argv[1]), trainer_pid=int(sys.argv[2]))
