"""The fake Cloud TPU API as a process: its side door, and the command that it runs for nodes."""

import json
import os
import signal
from pathlib import Path

import pytest

from tpuapi.clients import Clients, connected, create_request, node, node_name, state_of
from tpuapi.fake import FakeTpu
from tpuapi.hooks import CommandHook
from tpuapi.remote import AdminError, started

SHOW = ["sh", "-c", 'echo "$TPU_EVENT $TPU_REASON $TPU_NODE_ID $TPU_WORKER_ID $TPU_N_WORKERS"']
SCRIPT = ["sh", "-c", 'test -n "$TPU_STARTUP_SCRIPT" && "$TPU_STARTUP_SCRIPT" && cat "$TPU_METADATA_FILE"']


async def test_a_process_is_driven_through_its_side_door() -> None:
    with started("--speed=0", "--timing=creating_s=1", "--habit=default_page_size=1") as remote:
        remote.do("set_capacity", zone="us-west4-a", accelerator="v5litepod", cores=0)
        async with connected(remote.address) as clients:
            await clients.alpha.create_queued_resource(request=create_request("qr"))
            remote.do("step", seconds=1)
            assert await state_of(clients, "qr") == "WAITING_FOR_RESOURCES"
            remote.do("set_capacity", zone="us-west4-a", accelerator="v5litepod", cores=None)
            assert remote.do("step_to_next") == 60
            remote.do("set_timings", suspending_s=1)
            assert await state_of(clients, "qr") == "ACTIVE"
        state = remote.state()
        assert [each["name"] for each in state["nodes"]] == [node_name("qr")]
        assert [each["verb"] for each in state["operations"]] == ["create"]
        assert remote.counts() == {"CreateQueuedResource": 1, "GetQueuedResource": 2}
        assert [call["code"] for call in remote.calls()] == ["OK"] * 3
        events = remote.events()
        assert [(each["kind"], each["node"]["state"]) for each in events] == [("ready", "READY")]
        assert remote.events(after=events[-1]["number"]) == []


def test_the_side_door_says_what_is_wrong() -> None:
    with started("--speed=0") as remote:
        with pytest.raises(AdminError, match="no action 'break'"):
            remote.do("break")
        with pytest.raises(AdminError, match="preempt: 0 of the nodes are named 'x'"):
            remote.do("preempt", node="x")
        with pytest.raises(AdminError, match="unexpected keyword argument 'slow_s'"):
            remote.do("set_timings", slow_s=1)
        with pytest.raises(AdminError, match="'BAD' is no code"):
            remote.do("inject_error", method="*", code="BAD")


async def test_a_process_runs_its_hook_at_its_own_time(tmp_path: Path) -> None:
    """At a thousand times the speed, nobody steps and nobody asks."""
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\necho $TPU_EVENT $TPU_NODE_ID >> {tmp_path}/events\n")
    hook.chmod(0o700)
    (tmp_path / "events").touch()
    with started("--speed=1000", f"--hook={hook}", f"--hook-folder={tmp_path}") as remote:
        async with connected(remote.address) as clients:
            await clients.alpha.create_queued_resource(request=create_request("qr"))
        with (tmp_path / "events").open() as events:
            while not (line := events.readline()).endswith("\n"):
                assert remote.state()["now"] > 0
    assert line == "ready qr\n"


class TestCommandHook:
    async def test_it_runs_for_each_worker_and_event(
        self, tpu: FakeTpu, clients: Clients, tmp_path: Path
    ) -> None:
        hook = CommandHook(SHOW, tmp_path)
        tpu.add_hook(hook)
        pod = node(accelerator_type="v5litepod-16")
        await clients.alpha.create_queued_resource(request=create_request("qr", spec={"node": pod}))
        tpu.step(100)
        tpu.preempt("qr")
        await hook.settle()
        said = sorted(run.output.strip() for run in hook.runs[:4])
        assert said == [f"ready created qr {worker} 4" for worker in range(4)]
        said = sorted(run.output.strip() for run in hook.runs[4:])
        assert said == [f"gone preempted qr {worker} 4" for worker in range(4)]

    async def test_it_finds_the_startup_script_and_the_metadata(
        self, tpu: FakeTpu, clients: Clients, tmp_path: Path
    ) -> None:
        hook = CommandHook(SCRIPT, tmp_path)
        tpu.add_hook(hook)
        metadata = {"startup-script": "#!/bin/sh\necho joined\n", "token": "t"}
        request = create_request("qr", spec={"node": node(metadata=metadata)})
        await clients.alpha.create_queued_resource(request=request)
        tpu.step(100)
        await hook.settle()
        assert [run.exit_code for run in hook.runs] == [0]
        first, rest = hook.runs[0].output.split("\n", 1)
        assert first == "joined"
        assert json.loads(rest) == metadata

    async def test_it_can_be_kept_to_so_many_nodes_at_once(
        self, tpu: FakeTpu, clients: Clients, tmp_path: Path
    ) -> None:
        hook = CommandHook(SHOW, tmp_path, max_nodes=2)
        tpu.add_hook(hook)
        await clients.alpha.create_queued_resource(request=create_request("many", count=3))
        tpu.step(100)
        tpu.announce_maintenance("many-1", starts_in_s=0)
        tpu.preempt("many-2")
        tpu.preempt("many-0")
        await clients.alpha.create_queued_resource(request=create_request("next", count=2))
        tpu.step(100)
        await hook.settle()
        said = sorted(" ".join(run.output.split()[:3]) for run in hook.runs)
        assert said == [
            "gone maintenance many-1",
            "gone preempted many-0",
            "ready created many-0",
            "ready created many-1",
            "ready created next-0",
            "terminating maintenance many-1",
        ]

    async def test_its_failure_is_kept_and_changes_nothing(
        self, tpu: FakeTpu, clients: Clients, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hook = CommandHook(["sh", "-c", "echo no; exit 3"], tmp_path)
        tpu.add_hook(hook)
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        tpu.step(100)
        await hook.settle()
        assert [(run.exit_code, run.output) for run in hook.runs] == [(3, "no\n")]
        tpu.preempt("qr")
        await hook.settle()
        assert [run.event for run in hook.runs] == ["ready", "gone"]
        assert "exit_code=3" in capsys.readouterr().err
        assert await state_of(clients, "qr") == "ACTIVE"

    @pytest.mark.parametrize(
        ("command", "exit_code"),
        [(["/no/such/command"], 127), (["sleep", "60"], 124)],
        ids=["missing", "hanging"],
    )
    async def test_it_may_be_missing_or_hang(
        self, tpu: FakeTpu, clients: Clients, tmp_path: Path, command: list[str], exit_code: int
    ) -> None:
        hook = CommandHook(command, tmp_path, timeout_s=0.05)
        tpu.add_hook(hook)
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        tpu.step(100)
        await hook.settle()
        assert [run.exit_code for run in hook.runs] == [exit_code]

    async def test_what_it_leaves_running_is_not_waited_for(
        self, tpu: FakeTpu, clients: Clients, tmp_path: Path
    ) -> None:
        pid_file = tmp_path / "pid"
        hook = CommandHook(["sh", "-c", f"sleep 60 & echo $! > {pid_file}"], tmp_path)
        tpu.add_hook(hook)
        await clients.alpha.create_queued_resource(request=create_request("qr"))
        tpu.step(100)
        await hook.settle()
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        assert [run.exit_code for run in hook.runs] == [0]
