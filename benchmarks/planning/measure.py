"""One measurement in a process of its own, so that its peak memory is its own: JSON on standard output."""

import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.planning import ours, stock

from stepkeeper_planners.geometry.layout import TensorLayout

STATES = {
    "sharded": ours.sharded_state,
    "hybrid": ours.hybrid_state,
    "replicated": ours.replicated_state,
    "spiral": ours.spiral_state,
}


def main(planner: str, state: str, n_chunks: int, world_size: int) -> None:
    """Plan once, and print how long that took and the most memory that the process ever had."""
    began = time.perf_counter()
    layouts = STATES[state](n_chunks, world_size)
    made_s = time.perf_counter() - began
    plan = _chosen(planner, layouts, world_size)
    gc.collect()
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began, began_cpu = time.perf_counter(), time.process_time()
    n_pieces = plan()
    cpu_s = time.process_time() - began_cpu
    result = {
        "planner": planner,
        "state": state,
        "n_chunks": sum(len(layout.chunks) for layout in layouts),
        "world_size": world_size,
        "n_pieces": n_pieces,
        "plan_s": round(cpu_s, 3),
        "plan_wall_s": round(time.perf_counter() - began, 3),
        "state_made_s": round(made_s, 3),
        "peak_before_bytes": before_bytes,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))


def _chosen(planner: str, layouts: list[TensorLayout], world_size: int) -> Callable[[], int]:
    if planner == "ours, one rank":
        return partial(ours.plan_one_rank, layouts, 5 % world_size, world_size)
    if planner == "ours, coordinator":
        return partial(ours.plan_coordinator, layouts, world_size)
    return partial(stock.plan_all, stock.local_plans(layouts, world_size))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
