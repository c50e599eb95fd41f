"""Test how a hang is named by the stacks of its ranks, which are those that faulthandler wrote in such trainings."""

from typing import Final

import pytest

from stepkeeper.stacks.naming import RankStacks, Source, find_main_frame, list_ranks, name_hang

LIB: Final = "/usr/lib/python3.11"
TORCH: Final = f"{LIB}/site-packages/torch"


def frames(*places: str) -> str:
    """Return a stack of these places, the innermost first, each "file line function"."""
    lines = [place.split() for place in places]
    return "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in lines)


def stacks(*places: str, line: str = "", source: Source = Source.PYTHON, state: str = "S") -> RankStacks:
    """Return the stacks of a trainer whose main thread is at these places."""
    answering = frames("/app/companion_reader.py 9 go", f"{LIB}/threading.py 1002 _bootstrap")
    text = f"Current thread 0x00007f7e85f266c0 (most recent call first):\n{answering}\n"
    text += f"Thread 0x00007f7f9ac14b80 (most recent call first):\n{frames(*places)}"
    return RankStacks(text=text, source=source, state=state, line=line)


TRAIN: Final = "/app/train.py 30 main"
IN_REDUCE: Final = stacks(
    f"{TORCH}/distributed/distributed_c10d.py 2942 all_reduce",
    f"{TORCH}/distributed/c10d_logger.py 81 wrapper",
    TRAIN,
)
IN_BARRIER: Final = stacks(
    f"{TORCH}/distributed/distributed_c10d.py 4888 barrier",
    f"{TORCH}/distributed/c10d_logger.py 81 wrapper",
    "/app/train.py 77 evaluate",
)
IN_BACKWARD: Final = stacks(
    f"{TORCH}/autograd/graph.py 841 _engine_run_backward", f"{TORCH}/_tensor.py 647 backward", TRAIN
)
IN_WORK: Final = stacks(TRAIN, line="work.wait()")
IN_ITEM: Final = stacks(TRAIN, line="print(loss.item())")
IN_XLA: Final = stacks(f"{LIB}/site-packages/torch_xla/torch_xla.py 92 sync", TRAIN)
IN_LOOP: Final = stacks("/app/train.py 43 spin", TRAIN, line="while True: pass", state="R")
IN_STORE: Final = stacks("/app/train.py 34 main", line='store.get("key")')
IN_RENDEZVOUS: Final = stacks(f"{TORCH}/distributed/distributed_c10d.py 980 _store_based_barrier", TRAIN)
IN_MANAGER: Final = stacks(
    f"{LIB}/threading.py 331 wait",
    f"{LIB}/site-packages/stepkeeper/coordination/waits.py 90 run",
    f"{LIB}/site-packages/stepkeeper/manager.py 300 step",
    TRAIN,
)
FOR_WORKERS: Final = stacks(
    f"{LIB}/selectors.py 415 select",
    f"{LIB}/multiprocessing/connection.py 947 wait",
    f"{LIB}/multiprocessing/queues.py 113 get",
    f"{TORCH}/utils/data/dataloader.py 1275 _try_get_data",
    f"{TORCH}/utils/data/dataloader.py 732 __next__",
    TRAIN,
)
IN_DATASET: Final = stacks(
    "/app/data.py 10 __getitem__",
    f"{TORCH}/utils/data/_utils/fetch.py 52 fetch",
    f"{TORCH}/utils/data/dataloader.py 732 __next__",
    TRAIN,
)
ELSEWHERE: Final = stacks(
    "/app/torch/data.py 10 __getitem__",
    "/opt/packages/torch/utils/data/_utils/fetch.py 52 fetch",
    "/opt/packages/torch/utils/data/dataloader.py 732 __next__",
    TRAIN,
)
WITH_LOCK: Final = stacks("/app/train.py 51 call_c", TRAIN, source=Source.SIGNAL)
REDUCES_WITH_LOCK: Final = RankStacks(text=IN_REDUCE.text, source=Source.SIGNAL, state="S")
STOPPED: Final = RankStacks(text="", source=Source.NONE, state="T")
ON_DISK: Final = RankStacks(text="", source=Source.NONE, state="D")
UNREAD: Final = RankStacks(text="", source=Source.NONE, state="R")


@pytest.mark.parametrize(
    ("ranks", "missing", "kind", "blamed", "text"),
    [
        (
            [IN_LOOP],
            (),
            "Code",
            (0,),
            "rank 0 is running Python code at /app/train.py:43 in spin: while True: pass",
        ),
        ([STOPPED], (), "Stopped", (0,), "rank 0 is stopped by a signal (SIGSTOP) or a debugger"),
        (
            [WITH_LOCK],
            (),
            "GilHeld",
            (0,),
            "rank 0 is in C code that holds Python's lock at /app/train.py:51 in call_c",
        ),
        ([FOR_WORKERS], (), "DataLoader", (0,), "rank 0 is waiting for data at /app/train.py:30 in main"),
        (
            [IN_DATASET],
            (),
            "DataLoader",
            (0,),
            "rank 0 is waiting for data at /app/data.py:10 in __getitem__",
        ),
        (
            [ELSEWHERE],
            (),
            "DataLoader",
            (0,),
            "rank 0 is waiting for data at /app/torch/data.py:10 in __getitem__",
        ),
        (
            [IN_STORE],
            (),
            "Store",
            (0,),
            'store of the process group at /app/train.py:34 in main: store.get("key")',
        ),
        ([IN_RENDEZVOUS, IN_RENDEZVOUS], (), "Store", (0, 1), "ranks 0-1 are waiting for a key in the store"),
        ([ON_DISK], (), "Kernel", (0,), "rank 0 is waiting in the kernel, for a disk or a device"),
        ([UNREAD], (), "Unreadable", (0,), "its stacks can't be read"),
        ([IN_MANAGER, IN_MANAGER], (), "Manager", (0, 1), "waiting in a call of the checkpoint manager"),
        (
            [IN_REDUCE] * 3,
            (),
            "Collective",
            (0, 1, 2),
            "ranks 0-2 are waiting in a collective, or for its device at",
        ),
        ([IN_WORK, IN_WORK], (), "Collective", (0, 1), "train.py:30 in main: work.wait()"),
        ([IN_ITEM, IN_ITEM], (), "Collective", (0, 1), "loss.item()"),
        ([IN_XLA, IN_XLA], (), "Collective", (0, 1), "train.py:30 in main"),
        ([IN_BACKWARD, IN_BACKWARD], (), "Collective", (0, 1), "train.py:30 in main"),
        (
            [IN_REDUCE, IN_REDUCE, IN_LOOP, IN_REDUCE],
            (),
            "NotInCollective",
            (2,),
            "rank 2 is running Python code at /app/train.py:43 in spin: while True: pass; ranks 0-1, 3 are waiting",
        ),
        (
            [IN_REDUCE, IN_BARRIER, IN_REDUCE],
            (),
            "NotInCollective",
            (1,),
            "rank 1 is waiting in a collective",
        ),
        (
            [IN_REDUCE, IN_BARRIER],
            (),
            "NotInCollective",
            (0, 1),
            "rank 1 is waiting in a collective, or for its",
        ),
        (
            [IN_REDUCE, STOPPED],
            (),
            "Stopped",
            (1,),
            "rank 1 is stopped by a signal (SIGSTOP) or a debugger; rank 0",
        ),
        ([WITH_LOCK, IN_REDUCE], (), "GilHeld", (0,), "rank 1 is waiting in a collective"),
        ([WITH_LOCK, REDUCES_WITH_LOCK], (), "GilHeld", (0,), "rank 1 is waiting in a collective"),
        ([IN_REDUCE, IN_REDUCE, FOR_WORKERS], (), "DataLoader", (2,), "rank 2 is waiting for data"),
        (
            [IN_MANAGER, IN_LOOP],
            (),
            "NotInCollective",
            (1,),
            "rank 0 is waiting in a call of the checkpoint manager",
        ),
        ([IN_LOOP, STOPPED, FOR_WORKERS], (), "Stopped", (1,), "rank 2 is waiting for data"),
        ([IN_REDUCE], (1, 2), "NoAnswer", (1, 2), "ranks 1-2 are without an answer"),
    ],
)
def test_a_hang_is_named_by_the_rank_that_the_others_wait_for(
    ranks: list[RankStacks], missing: tuple[int, ...], kind: str, blamed: tuple[int, ...], text: str
) -> None:
    hang = name_hang(dict(enumerate(ranks)), missing)
    assert (hang.kind, hang.ranks) == (kind, blamed), hang.text
    assert text in hang.text


def test_many_ranks_make_a_short_text() -> None:
    many = {rank: stacks(f"/app/train.py {rank} main", line="x" * 120) for rank in range(1000)}
    text = name_hang(many | {7: STOPPED}).text
    assert text.startswith("rank 7 is stopped")
    assert text.endswith("ranks at other places: 996")
    assert len(text) < 1000
    assert list_ranks([5, 1, 2, 3, 9]) == "1-3, 5, 9"


def test_the_main_thread_is_the_last_one() -> None:
    assert find_main_frame(FOR_WORKERS.text) == (f"{LIB}/selectors.py", 415)
    assert find_main_frame("Fatal\n") is None
