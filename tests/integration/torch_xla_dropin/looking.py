"""An evaluator that constructs a manager on a root, over and over: python looking.py ROOT PAUSE_S. Input ends it."""

import json
import select
import sys

from stepkeeper import CheckpointManager

found: list[list[int]] = []
n_looks = 0
while True:
    manager = CheckpointManager(sys.argv[1], 10)
    n_looks += 1
    steps = manager.all_steps()
    manager.close()
    if not found or found[-1] != steps:
        found.append(steps)
    if select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:
        break
print(json.dumps({"looks": n_looks, "found": found}))
