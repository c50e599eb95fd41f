"""Draw random numbers in several ranks, and go on with them after a restart. Usage: RANK WORLD_SIZE ROOT FIRST LAST"""

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper import CheckpointManager, PerRank, RandomState, Whole

rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
first, last = int(sys.argv[4]), int(sys.argv[5])
port_file = folder / f"port-{first}-{world_size}"
if rank == 0:
    store = TCPStore("localhost", 0, world_size, is_master=True, wait_for_workers=False)
    port_file.with_suffix(".new").write_text(str(store.port), encoding="utf-8")
    port_file.with_suffix(".new").rename(port_file)
else:
    while not port_file.exists():
        time.sleep(0.01)
    store = TCPStore("localhost", int(port_file.read_text(encoding="utf-8")), world_size, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
# Each rank has data of its own; all drop out the same elements, as tensor-parallel ranks do.
random.seed(100 * first + rank)
torch.manual_seed(first)
history: list[dict[str, float]] = []
state = {"random": RandomState(), "history": Whole(history), "rank": PerRank(rank, resize=lambda *_: rank)}
drawn = []
with CheckpointManager((folder / "root").as_uri(), 2, chkpt_on_preemption=False) as manager:
    restored = manager.restore_latest(state)
    if restored and restored.step >= first:
        manager.restore(first - 1, state)
    assert len(history) == first - 1
    for step in range(first, last + 1):
        drawn.append([random.random(), float(torch.rand(()))])
        history.append({"step": step})
        manager.step(step, state)
(folder / f"{first}-{last}-{rank}-of-{world_size}").write_text(json.dumps(drawn), encoding="utf-8")
