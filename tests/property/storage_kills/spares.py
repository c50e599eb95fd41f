"""Companions that are forked, not started: a thousand starts of an interpreter would be most of what the kills cost."""

import ctypes
import os
import signal
import socket
import traceback
from collections.abc import Mapping, Sequence
from typing import Final

from storage_kills.deadly import arm_companion

from stepkeeper.companion import __main__ as companion
from stepkeeper.companion import processes

COMM: Final = "companion"  # in /proc/<pid>/comm
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def prepare_spares(n: int) -> None:
    """Fork `n` companions of this trainer before it has threads. They wait; what it starts after them is started."""
    ends = [_fork_spare() for _ in range(n)]
    start = processes.start_process

    def start_spare(
        arguments: Sequence[str], env: Mapping[str, str], end: int, end_number: int
    ) -> processes.ChildProcess:
        if not ends:
            return start(arguments, env, end, end_number)
        pid, spare = ends.pop()
        with spare:
            socket.send_fds(spare, [os.environ["STEPKEEPER_TEST_KILLS"].encode()], [end])
        return processes.ChildProcess(pid)

    processes.start_process = start_spare


def _fork_spare() -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _become_companion(theirs, os.getppid())
    theirs.close()
    return pid, ours


def _become_companion(end: socket.socket, trainer: int) -> None:
    """Do what `python -m stepkeeper.companion` does, with the environment and the socket that the trainer sends."""
    try:
        kills, fds, _, _ = socket.recv_fds(end, 65536, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, COMM.encode())
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        os.environ["STEPKEEPER_TEST_KILLS"] = kills.decode()
        arm_companion()
        companion.serve(fds[0], trainer)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
