"""The Cloud TPU API to test against, over the network: it shows what it shows in memory, and runs as a process."""

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2alpha1
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcAsyncIOTransport
from grpc import aio

from fake_cluster.queued_resources import CLUSTER_ID, PLACE, make_resource
from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, CloudTPU, CloudTPUError
from stepkeeper_operator.queued_resources.request import build_request
from tpuapi.cloud import FakeCloud
from tpuapi.hooks import CommandHook
from tpuapi.remote import AdminError, started
from tpuapi.wire import serving

ALPHA = ApiVersion.V2ALPHA1
SPECS: dict[str, dict[str, Any]] = {
    "guaranteed": {"tier": {"guaranteed": {"minDurationSeconds": 3600}}},
    "three best-effort slices": {"tier": {"bestEffort": {}}, "node": {"count": 3}},
    "a topology": {
        "node": {
            "acceleratorType": None,
            "acceleratorConfig": {"type": "V5P", "topology": "2x2x2"},
            "tags": ["web"],
        }
    },
    "a limit": {"queueing": {"validUntilSeconds": 600}},
}


@pytest.fixture
async def client(tpu: FakeCloud) -> AsyncIterator[GoogleCloudTPU]:
    async with serving(tpu) as address:
        made = GoogleCloudTPU(endpoint=address, insecure=True)
        yield made
        await made.close()


def request_of(**spec: Any) -> CloudRequest:
    return build_request(make_resource(**spec), number=0, cluster_id=CLUSTER_ID, script="#!/bin/sh\n")


async def look(cloud: CloudTPU) -> list[object]:
    """Return all that a cloud shows, by both versions."""
    return [
        each
        for version in ApiVersion
        for each in (
            *await cloud.list_queued_resources(PLACE, version),
            *await cloud.list_nodes(PLACE, version),
        )
    ]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
async def test_over_the_network_all_is_as_it_is_in_memory(
    tpu: FakeCloud, client: GoogleCloudTPU, spec: dict[str, Any]
) -> None:
    request = request_of(**spec)
    beside = FakeCloud()
    for cloud in (client, beside):
        await cloud.create_queued_resource(request)
    seen = set()
    while tpu.resources[PLACE, request.id].state != "SUSPENDED":
        shown = await look(client)
        assert shown == await look(tpu) == await look(beside)
        seen |= {node.state for node in tpu.nodes.values()}
        for cloud in (tpu, beside):
            if cloud.step_to_next() == 0 and cloud.nodes:
                node = request.node_ids[-1]
                cloud.announce_maintenance(node, starts_in_s=60, lasts_s=60, ends_in="TERMINATED")
    assert seen >= {"CREATING", "READY", "TERMINATED"}
    tpu.fail(request.id, "RESOURCE_EXHAUSTED", "no quota")
    (failed,) = await client.list_queued_resources(PLACE, ALPHA)
    assert (failed.state, failed.error_code, failed.error_message) == (
        "FAILED",
        "RESOURCE_EXHAUSTED",
        "no quota",
    )


async def test_refusals_carry_their_details(tpu: FakeCloud, client: GoogleCloudTPU) -> None:
    tpu.set_quota("v5litepod", 4)
    with pytest.raises(CloudTPUError, match=r"RESOURCE_QUOTA_EXCEEDED.*TPUPreemptibleV5sLitepod"):
        await client.create_queued_resource(request_of())
    with pytest.raises(CloudTPUError, match=r"labels: 'team: x\.y' is not"):
        await client.create_queued_resource(request_of(node={"labels": {"team": "x.y"}}))


async def test_without_force_a_queued_resource_with_nodes_is_not_deleted(tpu: FakeCloud) -> None:
    """force: "If set to true, all running nodes belonging to this queued resource will be deleted first"."""
    await tpu.create_queued_resource(request_of())
    tpu.step(100)
    async with serving(tpu) as address, aio.insecure_channel(address) as channel:
        google = tpu_v2alpha1.TpuAsyncClient(transport=TpuGrpcAsyncIOTransport(channel=channel))
        with pytest.raises(exceptions.FailedPrecondition, match="force"):
            await google.delete_queued_resource(name=f"{PLACE.parent}/queuedResources/team-v5e")


async def test_a_process_is_driven_through_its_side_door_and_runs_its_hook(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.touch()
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\necho $TPU_EVENT $TPU_NODE_ID >> {said}; cat $TPU_METADATA_FILE >> {said}\n")
    hook.chmod(0o700)
    timings = [f"--timing={name}_s=0" for name in ("creating", "provisioning")]
    with started(*timings, f"--hook={hook}") as remote:
        remote.do("set_capacity", accelerator="v5litepod", cores=0)
        client = GoogleCloudTPU(endpoint=remote.address, insecure=True)
        await client.create_queued_resource(request_of())
        await client.close()
        assert remote.state()["queued_resources"][0]["state"]["state"] == "WAITING_FOR_RESOURCES"
        remote.do("set_capacity", accelerator="v5litepod", cores=None)
        with said.open() as lines:
            while not (line := lines.readline()).endswith("\n"):
                assert len(remote.state()["queued_resources"]) == 1
            while not (metadata := lines.readline()).endswith("}"):
                assert line == "ready team-v5e\n"
        assert json.loads(metadata)["startup-script"] == "#!/bin/sh\n"
        assert [node["state"] for node in remote.state()["nodes"]] == ["READY"]
        assert remote.counts() == {"CreateQueuedResource": 1}
        assert [call["code"] for call in remote.calls()] == ["OK"]
        with pytest.raises(AdminError, match="preempt: 0 are named 'x'"):
            remote.do("preempt", node="x")
        with pytest.raises(AdminError, match="break: there is none"):
            remote.do("break")


async def run_hook(hook: CommandHook, *, preempt: bool = False, **spec: Any) -> None:
    cloud = FakeCloud()
    cloud.hooks.append(hook)
    await cloud.create_queued_resource(request_of(**spec))
    cloud.step(100)
    if preempt:
        for node in list(cloud.nodes.values())[:2]:
            cloud.preempt(node.id)
    await hook.settle()


async def test_a_hook_is_run_for_each_worker_of_so_many_nodes(tmp_path: Path) -> None:
    show = ["sh", "-c", 'echo "$TPU_EVENT $TPU_REASON $TPU_NODE_ID $TPU_WORKER_ID/$TPU_N_WORKERS"']
    hook = CommandHook(show, tmp_path, max_nodes=1)
    slices = {"acceleratorType": "v4-16", "runtimeVersion": "tpu-vm-base", "count": 3}
    await run_hook(hook, preempt=True, node=slices)
    assert sorted(run.output.strip() for run in hook.runs) == [
        "gone preempted team-v5e-0 0/2",
        "gone preempted team-v5e-0 1/2",
        "ready created team-v5e-0 0/2",
        "ready created team-v5e-0 1/2",
    ]


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [(["/no/such/command"], 127), (["sleep", "60"], 124), (["sh", "-c", "exit 3"], 3)],
    ids=["missing", "hanging", "failing"],
)
async def test_a_hook_that_fails_is_kept_and_changes_nothing(
    tmp_path: Path, command: list[str], exit_code: int
) -> None:
    hook = CommandHook(command, tmp_path, timeout_s=0.5)
    await run_hook(hook)
    assert [run.exit_code for run in hook.runs] == [exit_code]


async def test_what_a_hook_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hook = CommandHook(["sh", "-c", f"sleep 60 & echo $! > {pid_file}"], tmp_path)
    await run_hook(hook)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert [run.exit_code for run in hook.runs] == [0]
