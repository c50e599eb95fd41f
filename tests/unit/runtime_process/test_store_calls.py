"""A process whose background threads talk over the ranks' store ends by itself, not by an abort."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fork_server import ForkServer

from stepkeeper.coordination.store_calls import StoreCalls

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
    n_threads: int, after_s: float, torch_server: ForkServer, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    ends = [torch_server.run([program, n_threads, after_s]) for _ in range(3)]
    assert [end.returncode for end in ends] == [0, 0, 0], ends


def test_no_thread_of_the_background_begins_a_call_after_the_end() -> None:
    calls, begun, let_go = StoreCalls(), threading.Event(), threading.Event()

    @contextmanager
    def alone() -> Iterator[None]:
        yield
        let_go.set()

    def call() -> None:
        with calls.counted(alone=alone()):
            begun.set()

    calls.end(0.0)
    threading.Thread(target=call, daemon=True).start()
    assert let_go.wait(60)
    assert not begun.is_set()
    # Whoever is waited for at the end may still ask.
    waited_for = threading.Thread(target=call, daemon=False)
    waited_for.start()
    waited_for.join(60)
    assert begun.is_set()
