"""Measure the time from SIGTERM in one of two ranks until both have saved one step, beside the save's own time.

As a program it is one of the ranks: python -m benchmarks.saving.notice FOLDER RANK WAY SHAPE SIZE_MIB.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.saving.states import new_state
from torch.distributed import checkpoint as dcp

from stepkeeper import CheckpointManager, SaveReport

__all__ = ["WAYS", "measure"]

_N_RANKS: Final = 2
_STARTS: Final = 7
_STEP_S: Final = 0.02
_SETTLE_S: Final = 1.0
"""Seconds of training before the signal, and a tenth of a step more in each start."""

State = dict[str, torch.Tensor]


def stepkeeper(folder: Path, state: State) -> tuple[float, float]:
    """Train until `step` returns stop; return when that was, and how long the save took."""
    reports: list[SaveReport] = []
    manager = CheckpointManager(folder / "root", save=10**9)
    manager.save(1, state).result()
    manager.on_save(reports.append)
    print("trains", flush=True)
    for step in count(2):
        time.sleep(_STEP_S)
        if manager.step(step, state).stop:
            break
    ended_s = time.monotonic()
    while not reports:
        time.sleep(0.001)
    return ended_s, reports[-1].duration_s


def stock(folder: Path, state: State) -> tuple[float, float]:
    """Exchange after each step whether a signal has come, and then save with dcp.save."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    dcp.save(state, checkpoint_id=folder / "1")  # type: ignore[attr-defined]  # torch does not list it
    print("trains", flush=True)
    while True:
        time.sleep(_STEP_S)
        any_signal = torch.tensor(len(signals))
        dist.all_reduce(any_signal)
        if any_signal:
            break
    began_s = time.monotonic()
    dcp.save(state, checkpoint_id=folder / "2")  # type: ignore[attr-defined]  # torch does not list it
    return time.monotonic(), time.monotonic() - began_s


_RANKS: Final[dict[str, Callable[[Path, State], tuple[float, float]]]] = {
    "stepkeeper, 2 ranks": stepkeeper,
    "dcp.save, 2 ranks": stock,
}
WAYS: Final = tuple(_RANKS)


def measure(way: str, shape: str, size_mib: int, folder: Path) -> dict[str, Any]:
    """Start the ranks several times, and send SIGTERM to the last one each time."""
    found = [_measure_start(way, shape, size_mib, folder / str(number), number) for number in range(_STARTS)]
    return {
        "told_to_commit_s": [signaled_s for signaled_s, _ in found],
        "own_s": [own_s for _, own_s in found],
        "beside_s": [signaled_s - own_s for signaled_s, own_s in found],
    }


def _measure_start(way: str, shape: str, size_mib: int, folder: Path, number: int) -> tuple[float, float]:
    """Return the seconds from the signal to the slower rank's commit, and those of its save."""
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.saving.notice", str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), way, shape, str(size_mib)], stdout=subprocess.PIPE, text=True)
        for rank in range(_N_RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            while rank.stdout.readline() != "trains\n":
                if rank.poll() is not None:
                    raise RuntimeError(f"a rank ended with {rank.returncode}")
        time.sleep(_SETTLE_S + number * _STEP_S / 10)
        signaled_s = time.monotonic()
        ranks[-1].send_signal(signal.SIGTERM)
        said = [json.loads(rank.communicate()[0].splitlines()[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    ended_s, own_s = max((each["ended_s"], each["own_s"]) for each in said)
    return ended_s - signaled_s, own_s


def main() -> None:
    """Run one rank, and print its measurements."""
    folder, rank, way, shape, size_mib = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5])
    dist.init_process_group("gloo", init_method=(folder / "ranks").as_uri(), rank=rank, world_size=_N_RANKS)
    ended_s, own_s = _RANKS[way](folder, new_state(shape, size_mib))
    print(json.dumps({"ended_s": ended_s, "own_s": own_s}), flush=True)


if __name__ == "__main__":
    main()
