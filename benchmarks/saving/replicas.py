"""Measure what the comparison of copies adds to the stall of a save, by the snapshots of one of several ranks."""

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from unittest import mock

import torch
from benchmarks.saving.states import new_state

from stepkeeper.save.snapshot import take
from stepkeeper.save.snapshot.region import Region
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.saving.copies import CopyDigests

__all__ = ["WAYS", "measure"]

WAYS: Final = ("2 ranks", "8 ranks")
_ROUNDS: Final = 15


class _NoDigests(CopyDigests):
    """Read nothing."""

    def __init__(self, *_: object) -> None:
        super().__init__(())


def measure(way: str, shape: str, size_mib: int) -> dict[str, Any]:
    """Take snapshots with and without digests in turn, of tensors that all ranks hold.

    Returns:
        The median seconds of a snapshot: with digests, without, and of a copy of all of the state, which
        `dcp.async_save` makes on each rank.
    """
    state = new_state(shape, size_mib)
    taker, region = take.SnapshotTaker(Ranks(rank=0, world_size=int(way.split(maxsplit=1)[0]))), Region()
    copy = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    taken_s: dict[str, list[float]] = {"with_s": [], "without_s": [], "copy_s": []}
    for number in range(_ROUNDS + 1):
        for key, seconds in taken_s.items():
            began_s = time.perf_counter()
            if key == "copy_s":
                for name, tensor in state.items():
                    copy[name].copy_(tensor)
            else:
                with _without_digests() if key == "without_s" else nullcontext():
                    taker.take_snapshot(state, region)
            if number:  # the first one plans
                seconds.append(time.perf_counter() - began_s)
    region.close()
    return {key: statistics.median(seconds) for key, seconds in taken_s.items()}


def _without_digests() -> AbstractContextManager[object]:
    return mock.patch.object(take, "CopyDigests", _NoDigests)
