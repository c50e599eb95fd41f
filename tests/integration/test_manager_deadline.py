"""The time that a notice leaves: kept where saves stand still, and no limit where nobody is killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last, hear, hear_rest
from waiting_ranks import GRACE_S, all_end_in_time

from stepkeeper.cli.blocks import verify_commit
from stepkeeper.contract import ExitCode
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper.storage.retry import DEFAULT_PATIENCE

TRAINER = Path(__file__).parent / "manager_trainer" / "notified.py"
N_RANKS = 2
SIZE = 2_000_000

Servers = tuple[ForkServer, ForkServer]


def start(servers: Servers, folder: Path, number: int, **options: Any) -> list[ForkedProcess]:
    said = json.dumps({"size": SIZE, "start": number, **options})
    env = {**os.environ, "FORKED_TELLS_END": "1"}
    return [
        servers[rank % 2].start([TRAINER, folder, rank, N_RANKS, said], env=env, stdout=subprocess.PIPE)
        for rank in range(N_RANKS)
    ]


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Stop processes, and kill them at last."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        kill(pids)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_next_start(servers: Servers, folder: Path, number: int) -> int:
    """Check that every live commit is whole, and that a start goes on from the newest; return its step."""
    store = open_store((folder / "root").as_uri())
    log = Log(store).open()
    assert log.latest is not None
    for record in log.live:
        assert verify_commit(store, record, patience=DEFAULT_PATIENCE).bad == ()
    step = log.latest.step
    again = start(servers, folder, number, grace_s=120, steps=3)
    with ended_at_last(again):
        said = [hear(process, "start") for process in again]
        for process in again:
            hear_rest(process)
    assert [process.returncode for process in again] == [ExitCode.DONE] * N_RANKS
    assert said == [{"event": "start", "step": step, "least": step, "most": step}] * N_RANKS
    return step


@pytest.mark.parametrize("told", [0, 1])
def test_ranks_whose_companions_stand_still_are_out_before_the_deadline(
    torch_servers: Servers, tmp_path: Path, told: int
) -> None:
    ranks = start(torch_servers, tmp_path, 0, grace_s=GRACE_S)
    with ended_at_last(ranks):
        companions = [hear(process, "saved")["companion"] for process in ranks]
        with frozen(companions):
            told_s = time.monotonic()
            ranks[told].send_signal(signal.SIGTERM)
            codes = all_end_in_time(ranks, told_s, {"grace_s": GRACE_S}, told=ranks[told])
    assert codes[told] == ExitCode.SAVED
    assert codes[1 - told] in (ExitCode.SAVED, ExitCode.PEER_LOST)
    assert check_next_start(torch_servers, tmp_path, 1) == 1


@pytest.mark.parametrize("asks", [{"call": 1}, {"directive": 0}], ids=["call", "directive"])
def test_a_stop_that_nobody_is_killed_for_saves_however_long_that_takes(
    torch_servers: Servers, tmp_path: Path, asks: dict[str, int]
) -> None:
    ranks = start(torch_servers, tmp_path, 0, grace_s=2, save_s=4.0, asks=asks)
    with ended_at_last(ranks):
        stops = {hear(process, "stops")["step"] for process in ranks}
        for process in ranks:
            hear_rest(process)
    assert [process.returncode for process in ranks] == [ExitCode.SAVED] * N_RANKS
    assert stops == {check_next_start(torch_servers, tmp_path, 1)}
