"""A trainer with a companion and a child that C code forked: both have the companion's socket.

Says who they are, and waits.
"""

import ctypes
import json
import time

from stepkeeper.companion.client import CompanionProcess

companion = CompanionProcess(lambda _: None)
# Python's hooks would close the socket in the child. PyDLL keeps the interpreter's lock, which the child needs.
libc = ctypes.PyDLL(None)
child = libc.fork()
if child == 0:
    libc.pause()
print(json.dumps({"companion": companion.pid, "child": child}), flush=True)
time.sleep(120)
