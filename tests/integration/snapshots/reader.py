"""An evaluator beside a training, every second a manager on its root: python reader.py ROOT LOOKS. It never ends.

What it finds is a line of JSON in LOOKS each time.
"""

import json
import sys
import time
from pathlib import Path

from stepkeeper import CheckpointManager

while True:
    steps = CheckpointManager(sys.argv[1], 10).all_steps()
    with Path(sys.argv[2]).open("a") as looks:
        looks.write(f"{json.dumps(steps)}\n")
    time.sleep(1)
