"""Fork a worker at the moment at which the first save starts the companion, then lose that companion.

Usage: first_save.py ROOT-URI hooked|unhooked. Prints what happened as JSON.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from workers import PausedStart, end_workers, open_files, own_files, until

from stepkeeper import CheckpointManager

_WAIT_S = 60.0

root, how = sys.argv[1:]
start = PausedStart()
facts: dict[str, object] = {}
state = {"w": torch.arange(10)}
with CheckpointManager(root, 1) as manager:
    manager.save_async(1, state)
    in_flight = manager.in_flight
    assert in_flight is not None
    worker = start.fork(hooked=how == "hooked")
    try:
        in_flight.result(_WAIT_S)
        facts["committed"] = manager.health().committed_step
        facts["inherited"] = sorted(open_files(worker) & own_files(manager))
        facts["mapped"] = Path(f"/proc/{worker}/maps").read_text().count("stepkeeper-snapshot")
        companion = manager.health().companion_pid
        assert companion is not None
        os.kill(companion, signal.SIGKILL)
        killed_s = time.monotonic()
        facts["noticed"] = until(lambda: manager.health().companion_pid is None, _WAIT_S)
        facts["noticed_s"] = time.monotonic() - killed_s
        manager.save_async(2, state)
        in_flight = manager.in_flight
        assert in_flight is None or in_flight.result(_WAIT_S)
        facts["committed_then"] = manager.health().committed_step
    except TimeoutError as error:
        facts["timeout"] = str(error)
        print(json.dumps(facts), flush=True)
        os._exit(0)
    finally:
        end_workers([worker])
print(json.dumps(facts), flush=True)
