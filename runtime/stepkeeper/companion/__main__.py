"""The companion process: writes, deletes and reports for one trainer, and ends when the trainer does.

Started by the trainer: python -m stepkeeper.companion <socket's file descriptor> <trainer's pid>
"""

import signal
import sys

from stepkeeper.companion.server import serve

for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    # A pod's end is the trainer's to handle; the companion ends after it.
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])

serve(socket_fd=int(sys.argv[1]), trainer_pid=int(sys.argv[2]))
