"""One of several ranks on gloo: python ranks.py RANK WORLD_SIZE FOLDER CASE OPTIONS-AS-JSON."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stepkeeper.torch_xla as xc
from stepkeeper import CheckpointManager, Options
from stepkeeper.errors import StorageError
from stepkeeper.policy.save import EverySeconds
from stepkeeper_testing.trainer import in_pod, join, say, slow_shares

RANK, WORLD_SIZE, FOLDER, CASE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
OPTIONS = json.loads(sys.argv[5]) if sys.argv[5:] else {}
ROOT = FOLDER / "root"


def refuse_one(write: Callable[..., Any], job: Any, *args: Any, **options: Any) -> Any:
    """Write this rank's shares, but that of one step."""
    if job.step == OPTIONS["refused_at"]:
        raise StorageError("the quota is used up")
    return write(job, *args, **options)


def train() -> None:
    """Train for so many steps, or until a notice, and say of each step what it did."""
    state: dict[str, Any] = {"a": torch.zeros(1000), "b": torch.zeros(700), "step": 0}
    policy = EverySeconds(OPTIONS["seconds"]) if "seconds" in OPTIONS else OPTIONS["interval"]
    if "pod" in OPTIONS:
        place: dict[str, Any] = {"hosts_per_slice": WORLD_SIZE, "host_index": RANK, "pod": f"lm-{RANK}"}
        manager = in_pod(FOLDER, RANK, steps=OPTIONS["interval"], **place)
    else:
        manager = CheckpointManager(
            ROOT, save=policy, options=Options(on_save_failure=OPTIONS.get("tolerated", 0))
        )
    if RANK == 1 and "refused_at" in OPTIONS:
        slow_shares(refuse_one)
    with manager:
        restored = manager.restore(state)
        first = restored.step + 1 if restored else 1
        say("start", step=first - 1, a=state["a"][0].item(), b=state["b"][-1].item(), value=state["step"])
        for step in range(first, OPTIONS["steps"] + 1):
            state["a"] += 1
            state["b"] += 1
            state["step"] = step
            if OPTIONS.get("collective"):
                dist.all_reduce(torch.ones(1))
            if step == OPTIONS.get("fail_at") and RANK == 1:
                # Its companion gets no answer from the store any more.
                (ROOT / str(step)).write_text("")
            outcome = manager.step(step, state)
            say("step", step=step, stop=outcome.stop, saved=outcome.in_flight is not None)
            if outcome.stop:
                break
            time.sleep(OPTIONS.get("pause_s", 0.0) * (1 + RANK))


def end() -> None:
    """Save every 5 steps, and do something else than planned after the last one, in one of the ranks."""
    how, last = OPTIONS["how"], 7
    state: dict[str, Any] = {"w": torch.zeros(100), "step": 0}
    n_steps = last - 1 if how == "uneven" and RANK == 1 else last
    with CheckpointManager(ROOT, save=5, total_steps=last if how == "total" else None) as manager:
        manager.restore(state)
        for step in range(1, n_steps + 1):
            state["w"] += 1
            state["step"] = step
            manager.step(step, state)
        manager.wait()
        if how == "changed" and RANK == 1:
            state["w"] += 1
        if how in {"notice", "told"} and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()
        if how == "told":
            sys.exit()


def evict() -> None:
    """All ranks see what is deleted as soon as `save` and `join` return."""

    def state_of(step: int) -> dict[str, Any]:
        return {"w": torch.full((1000,), float(step)), "step": step}

    with xc.CheckpointManager(ROOT, 1, 2) as manager:
        for step in range(1, 8):
            manager.save(step, state_of(step))
            assert manager.all_steps() == [step - 1, step][-step:], (step, manager.all_steps())
        for step in range(8, 15):
            manager.save_async(step, state_of(step))
        manager.join()
        assert manager.all_steps() == [13, 14], manager.all_steps()
        assert sorted(int(path.parts[-3]) for path in ROOT.glob("*/*/.metadata")) == [13, 14]


CASES: dict[str, Callable[[], None]] = {"train": train, "end": end, "evict": evict}

join(RANK, WORLD_SIZE, FOLDER)
CASES[CASE]()
dist.destroy_process_group()
