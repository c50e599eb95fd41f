"""Form the process group, and build the model for ever, without a manager yet: building.py SIGN [deaf]."""

import ctypes
import sys
import time
from pathlib import Path

import stepkeeper

if __name__ == "__main__":
    stepkeeper.distributed.init()
    Path(sys.argv[1]).touch()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2 if "deaf" in sys.argv else 0):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
    time.sleep(600)
