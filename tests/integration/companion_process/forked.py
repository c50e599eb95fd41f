"""A trainer with a companion and a forked child: both have the companion's socket. Says who they are, and waits."""

import json
import os
import time

from stepkeeper.companion.client import CompanionProcess

companion = CompanionProcess(lambda _: None)
child = os.fork()
if child:
    print(json.dumps({"companion": companion.pid, "child": child}), flush=True)
time.sleep(120)
