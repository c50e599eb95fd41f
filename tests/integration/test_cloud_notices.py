"""Test trainings whose machines' metadata server announces a maintenance, and then a preemption."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from rank_talk import ended_at_last, hear, hear_rest

from stepkeeper.contract import Cause, ExitCode
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.left_behind import last_word
from stepkeeper_testing.metadata_server import FakeMetadataServer

RANK = Path(__file__).parent / "manager_trainer" / "ranks.py"


def await_commit(root: Path, after: int = 0) -> int:
    """Wait for a commit of a step greater than `after`, and return its step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        latest = Log(open_store(root.as_uri())).open().latest
        if latest is not None and latest.step > after:
            return latest.step
        time.sleep(0.05)
    raise AssertionError("no commit")


@pytest.mark.smoke
@pytest.mark.timeout(180)
def test_one_machine_is_maintained_then_preempted_and_all_ranks_follow(
    tmp_path: Path, torch_servers: tuple[ForkServer, ForkServer]
) -> None:
    """Only rank 1's machine has a metadata server; at first that isn't up."""
    options = json.dumps({"steps": 10**6, "interval": 10**6, "pause_s": 0.004, "pod": True})
    root = tmp_path / "root"
    with FakeMetadataServer() as server:
        server.failing = 3
        started: list[Any] = []
        for rank in range(2):
            # A proxy that isn't there: whoever asks it gets nowhere.
            env = os.environ | {"http_proxy": "http://127.0.0.1:9"}
            env |= {"GCE_METADATA_HOST": server.host} if rank else {}
            started.append(
                torch_servers[rank].start(
                    [RANK, rank, 2, tmp_path, "train", options], env=env, stdout=subprocess.PIPE
                )
            )
        with ended_at_last(started):
            for process in started:
                hear(process, "step", at_least=20)
            server.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
            saved = await_commit(root)
            for process in started:
                assert not hear(process, "step", at_least=saved + 20)["stop"], (
                    "training goes on until it comes"
                )
            server.set("preempted", "TRUE")
            last = [hear_rest(process)[-1] for process in started]
            assert [process.returncode for process in started] == [ExitCode.SAVED] * 2
    assert last[0] == last[1]
    assert last[0]["stop"]
    assert await_commit(root, after=saved) == last[0]["step"]
    ends = [last_word(tmp_path, rank) for rank in range(2)]
    assert [(end.notice, end.cause) for end in ends] == [("peer", None), ("preempted", Cause.SPOT_PREEMPTION)]
    assert {end.committed.step for end in ends if end.committed is not None} == {last[0]["step"]}
