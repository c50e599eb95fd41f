"""While a root takes nothing, a second save's copies leave their devices: python devices.py FOLDER. Says it in JSON."""

import json
import os
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch_xla.runtime as xr

from stepkeeper import CheckpointManager
from stepkeeper.save.snapshot import Region, Snapshot, SnapshotTaker

FOLDER = Path(sys.argv[1])
LONGEST_S = 30.0


def copies_noted() -> list[list[weakref.ref[torch.Tensor]]]:
    """For each snapshot of this process its copies on devices, from when it is taken."""
    found: list[list[weakref.ref[torch.Tensor]]] = []
    take = SnapshotTaker.take_snapshot

    def noted(
        snapshots: SnapshotTaker,
        state: Mapping[str, object],
        region: Region,
        *,
        timeout_s: float | None = None,
    ) -> Snapshot:
        snapshot = take(snapshots, state, region, timeout_s=timeout_s)
        found.append([weakref.ref(piece.tensor) for piece in snapshot.on_device])
        return snapshot

    SnapshotTaker.take_snapshot = noted  # type: ignore[method-assign,assignment]  # nothing of ours says where its copies are
    return found


def left_after_saves(name: str, **options: Any) -> list[int]:
    """Count the copies left on devices after two saves that the root has none of, once that number is stable."""
    noted = copies_noted()
    state = {"w": torch.randn(64, 64).to("xla"), "b": torch.randn(64).to("xla")}
    hold = Path(os.environ["STEPKEEPER_TEST_HOLD"])
    with CheckpointManager(str(FOLDER / name), 1, **options) as manager:
        hold.touch()
        for step in (1, 2):
            manager.save_async(step, state)
        assert [len(copies) for copies in noted] == [2, 2]
        ends_s = time.monotonic() + LONGEST_S
        while any(copy() is not None for copies in noted for copy in copies) and time.monotonic() < ends_s:
            time.sleep(0.01)
        left = [sum(copy() is not None for copy in copies) for copies in noted]
        assert manager.all_steps() == []
        hold.unlink()
        manager.wait()
        assert manager.all_steps() == [1, 2]
    return left


def main() -> None:
    xr.use_spmd()
    two = left_after_saves("two-in-memory", max_pending_async=2)
    print(json.dumps({"two in memory": two, "tier": left_after_saves("tier", local_tier=FOLDER / "disk")}))


main()
