"""A notice that comes while all ranks are in a C call: each knows of it within a second, and all save one step."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fork_server import ForkServer
from processor_waits import ProcessorWaits
from rank_talk import ended_at_last, hear, hear_rest
from waiting_ranks import head_step

from stepkeeper.contract import ExitCode, Termination

TRAINER = Path(__file__).parent / "manager_trainer" / "notified.py"
CALL_S = 30
WITHIN_S = 1.0


@pytest.mark.parametrize(("world_size", "told"), [(2, 0), (2, 1), (4, 3)])
def test_all_know_of_a_notice_within_a_second(
    torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path, world_size: int, told: int
) -> None:
    options = json.dumps({"grace_s": 120, "stands_s": CALL_S})
    processes = [
        torch_servers[rank % 2].start([TRAINER, tmp_path, rank, world_size, options], stdout=subprocess.PIPE)
        for rank in range(world_size)
    ]
    with ended_at_last(processes):
        for process in processes:
            hear(process, "stands")
        time.sleep(0.5)
        with ProcessorWaits([process.pid for process in processes]) as waits:
            told_s = time.monotonic()
            processes[told].send_signal(signal.SIGTERM)
            known = [hear(process, "knows") for process in processes]
        lost_s = waits.until_s(time.monotonic())
        (tmp_path / "go").touch()
        stops = [each["step"] for process in processes for each in hear_rest(process)]
    after_s = [each["at_s"] - told_s for each in known]
    print(f"known after {after_s} s, of which the machine was busy with others for {lost_s:.2f}")
    assert max(after_s) - lost_s < WITHIN_S
    assert [each["of"] for each in known] == [
        "sigterm" if rank == told else "peer" for rank in range(world_size)
    ]
    assert [process.returncode for process in processes] == [ExitCode.SAVED] * world_size
    assert stops == [head_step(tmp_path)] * world_size
    words = [
        Termination.from_json((tmp_path / f"termination.{rank}").read_bytes()) for rank in range(world_size)
    ]
    assert {word.code for word in words} == {ExitCode.SAVED}
