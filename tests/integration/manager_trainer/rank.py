"""One of several ranks on gloo: python rank.py URI RANK WORLD_SIZE FOLDER STEPS OPTIONS-AS-JSON."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from stepkeeper import CheckpointManager
from stepkeeper.contract import Interval, OnDisruption, Settings
from stepkeeper.policy.save import EverySeconds
from stepkeeper.training.environment import PodPaths
from stepkeeper_testing.pod import pod_environ, pod_identity


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def join(rank: int, world_size: int, folder: Path) -> None:
    port_file = folder / "port"
    if rank == 0:
        store = TCPStore("localhost", 0, world_size, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.01)
        store = TCPStore("localhost", int(port_file.read_text()), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def open_manager(
    uri: str, rank: int, world_size: int, folder: Path, options: dict[str, Any]
) -> CheckpointManager:
    policy = EverySeconds(options["seconds"]) if "seconds" in options else options["interval"]
    if "disruption" not in options:
        return CheckpointManager(uri, policy, chkpt_on_preemption=options.get("preemption", True))
    pod = folder / f"pod-{rank}"
    pod.mkdir()
    interval, on_disruption = Interval(steps=options["interval"]), OnDisruption(options["disruption"])
    (pod / "settings.json").write_bytes(
        Settings(uri=uri, interval=interval, on_disruption=on_disruption).to_json()
    )
    os.environ.update(
        pod_environ(pod_identity(hosts_per_slice=world_size, host_index=rank, pod=f"lm-{rank}"))
    )
    places = PodPaths(
        settings_folder=pod,
        notice_file=pod / "notice",
        termination_file=pod / "end",
        token_file=pod / "token",
    )
    return CheckpointManager.from_env(places=places)


def main() -> None:
    uri, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, n_steps, options = Path(sys.argv[4]), int(sys.argv[5]), json.loads(sys.argv[6])
    join(rank, world_size, folder)
    state: dict[str, Any] = {"a": torch.zeros(1000), "b": torch.zeros(700), "step": 0}
    with open_manager(uri, rank, world_size, folder, options) as manager:
        restored = manager.restore_latest(state)
        first = restored.step + 1 if restored else 1
        say("start", step=first - 1, a=state["a"][0].item(), b=state["b"][-1].item(), value=state["step"])
        for step in range(first, n_steps + 1):
            state["a"] += 1
            state["b"] += 1
            state["step"] = step
            if options.get("collective"):
                dist.all_reduce(torch.ones(1))
            if step == options.get("fail_at") and rank == 1:
                # Its companion gets no answer from the store any more.
                Path(uri.removeprefix("file://"), str(step)).write_text("")
            if options.get("asks"):
                say("step", step=step, saved=manager.should_save(step) and manager.save_async(step, state))
            else:
                outcome = manager.step(step, state)
                say("step", step=step, stop=outcome.stop, saved=outcome.in_flight is not None)
                if outcome.stop:
                    break
            time.sleep(options.get("pause_s", 0.0) * (1 + rank))
    dist.destroy_process_group()


main()
