"""A process whose background threads talk over the ranks' store ends by itself, not by an abort."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import threading
from datetime import timedelta
from torch.distributed import TCPStore
from stepkeeper.coordination.store_rank_group import StoreRankGroup

store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
group = StoreRankGroup(store, 0, 1)

def look():
    while True:
        group.read_proposal("nobody-proposed")

for _ in range(int(sys.argv[1])):
    threading.Thread(target=look, daemon=True).start()
threading.Event().wait(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("n_threads", "after_s"), [(8, 0.05), (64, 0.0)], ids=["talking", "connecting"])
def test_a_process_with_threads_in_the_store_does_not_abort_at_its_end(
    n_threads: int, after_s: float
) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(n_threads), str(after_s)]
    assert [subprocess.run(command, check=False).returncode for _ in range(3)] == [0, 0, 0]
