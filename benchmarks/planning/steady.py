"""Measure rank 0's train thread in saves of 100,000 chunks on 1,024 ranks: the first save, and those after it.

A step that isn't saved is measured too.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepkeeper import CheckpointManager
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import SnapshotTaker
from stepkeeper_planners.geometry.layout import Ranks

OUT: Final = Path(__file__).parents[1] / "results" / "steady.json"
WORLD_SIZE: Final = 1024
N_CHUNKS: Final = 100_000
_HYBRID_SHARDS: Final = 64
_SAVES: Final = 10
_STEPS: Final = 50_000


def main() -> None:
    """Measure, print, and write the results."""
    idle = _nothing_due()
    print(", ".join(f"{key}: {value}" for key, value in idle.items()), flush=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    results = []
    for name, state_of in STATES.items():
        found = {"state": name} | _measured(state_of())
        results.append(found)
        print(", ".join(f"{key}: {value}" for key, value in found.items()), flush=True)
    dist.destroy_process_group()
    machine = {"measured": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count()}
    machine |= {"machine": platform.machine(), "torch": torch.__version__}
    document = {"machine": machine, "nothing_due": idle, "results": results}
    OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _nothing_due() -> dict[str, Any]:
    """Measure `CheckpointManager.step` where no step is due, with a state of 10,000 tensors."""
    state = {f"layers.{n}.weight": torch.ones(4) for n in range(10_000)}
    taken_s = []
    with TemporaryDirectory() as folder, CheckpointManager(folder, save=10**9) as manager:
        for step in range(_STEPS):
            began_s = time.perf_counter()
            manager.step(step, state)
            taken_s.append(time.perf_counter() - began_s)
    # The first one prepares the first save.
    taken_s = sorted(taken_s[1:])
    return {
        "steps": len(taken_s),
        "median_us": round(taken_s[len(taken_s) // 2] * 1e6, 1),
        "p99_us": round(taken_s[int(len(taken_s) * 0.99)] * 1e6, 1),
        "p99.9_us": round(taken_s[int(len(taken_s) * 0.999)] * 1e6, 1),
    }


def _measured(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    snapshots, region = SnapshotTaker(Ranks(rank=0, world_size=WORLD_SIZE)), Region()
    began_s = time.perf_counter()
    snapshots.prepare(state, region)
    prepared_s = time.perf_counter() - began_s
    taken_s = []
    for _ in range(_SAVES):
        began_s = time.perf_counter()
        snapshot = snapshots.take_snapshot(state, region)
        taken_s.append(time.perf_counter() - began_s)
    size_bytes = sum(tensor.nbytes for tensor in region.view_orders(snapshot.tensors))
    region.close()
    return {
        "tensors": len(state),
        "written_by_rank_0": len(snapshot.tensors),
        "written_bytes": size_bytes,
        "prepare_s": round(prepared_s, 3),
        "first_ms": round(taken_s[0] * 1000, 1),
        "steady_ms": round(statistics.median(taken_s[1:]) * 1000, 1),
        "most_ms": round(max(taken_s[1:]) * 1000, 1),
    }


def _sharded() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    return {f"layers.{n}.weight": _part(mesh, [Shard(0)]) for n in range(N_CHUNKS // WORLD_SIZE)}


def _hybrid() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE // _HYBRID_SHARDS, _HYBRID_SHARDS))
    return {
        f"layers.{n}.weight": _part(mesh, [Replicate(), Shard(0)]) for n in range(N_CHUNKS // _HYBRID_SHARDS)
    }


def _replicated() -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.ones(4, 16) for n in range(N_CHUNKS)}


def _part(mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    return DTensor.from_local(torch.ones(2, 64), mesh, placements, run_check=False)


STATES: Final[dict[str, Callable[[], dict[str, torch.Tensor]]]] = {
    "sharded": _sharded,
    "hybrid": _hybrid,
    "replicated": _replicated,
}


if __name__ == "__main__":
    main()
