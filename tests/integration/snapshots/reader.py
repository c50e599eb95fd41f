"""An evaluator beside a training: every second a manager on its root, python reader.py ROOT. Ends badly, or never."""

import sys
import time

from stepkeeper import CheckpointManager

while True:
    CheckpointManager(sys.argv[1], 10).all_steps()
    time.sleep(1)
