"""Draw random numbers in several ranks, and go on with them after a restart. Usage: RANK WORLD_SIZE ROOT FIRST LAST"""

import json
import random
import sys
from pathlib import Path

import torch

from stepkeeper import PerRank, RandomState, Whole
from stepkeeper_testing.trainer import join, open_manager

rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
first, last = int(sys.argv[4]), int(sys.argv[5])
join(rank, world_size, folder)
# Each rank has data of its own; all drop out the same elements, as tensor-parallel ranks do.
random.seed(100 * first + rank)
torch.manual_seed(first)
history: list[dict[str, float]] = []
state = {"random": RandomState(), "history": Whole(history), "rank": PerRank(rank, resize=lambda *_: rank)}
drawn = []
with open_manager(folder / "root", 2) as manager:
    restored = manager.restore(state)
    if restored and restored.step >= first:
        manager.restore(state, first - 1)
    assert len(history) == first - 1
    for step in range(first, last + 1):
        drawn.append([random.random(), float(torch.rand(()))])
        history.append({"step": step})
        manager.step(step, state)
(folder / f"{first}-{last}-{rank}-of-{world_size}").write_text(json.dumps(drawn), encoding="utf-8")
