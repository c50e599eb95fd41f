"""A process whose background threads talk over the ranks' store ends by itself, not by an abort."""

import subprocess
import sys

_PROGRAM = """
import threading
from datetime import timedelta
from torch.distributed import TCPStore
from stepkeeper.coordination.store_rank_group import StoreRankGroup

store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
group = StoreRankGroup(store, 0, 1)

def look():
    while True:
        group.read_proposal("nobody-proposed")

for _ in range(8):
    threading.Thread(target=look, daemon=True).start()
threading.Event().wait(0.05)
"""


def test_a_process_with_threads_in_the_store_does_not_abort_at_its_end() -> None:
    ends = [subprocess.run([sys.executable, "-c", _PROGRAM], check=False).returncode for _ in range(3)]
    assert ends == [0, 0, 0]
