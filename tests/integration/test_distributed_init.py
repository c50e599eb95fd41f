"""`stepkeeper.distributed.init()` under each launcher, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from fork_server import ForkedProcess, ForkServer
from free_ports import free_port

from stepkeeper.contract import Termination
from stepkeeper_testing.pod import pod_environ, pod_identity

SCRIPTS = Path(__file__).parent / "distributed_init"
PATIENCE_S = 120
Start = Callable[..., tuple[ForkedProcess, Path]]
"""start(environ, timeout_s=…): a process that calls `init`, and the file that it writes to."""


@pytest.fixture
def start(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> Iterator[Start]:
    processes: list[ForkedProcess] = []

    def start(environ: Mapping[str, str], timeout_s: float = PATIENCE_S) -> tuple[ForkedProcess, Path]:
        output = tmp_path / f"{len(processes)}.txt"
        with output.open("w") as stream:
            processes.append(
                torch_servers[len(processes) % 2].start(
                    [SCRIPTS / "joining.py", timeout_s],
                    env={**os.environ, **environ},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
        return processes[-1], output

    yield start
    for process in processes:
        process.kill()


def joined(output: str) -> list[list[object]]:
    """What the processes that joined have said: device, rank, world size, local rank."""
    lines = [line.removeprefix("joined ") for line in output.splitlines() if line.startswith("joined ")]
    return sorted(json.loads(line) for line in lines)


@pytest.mark.smoke
def test_pods_of_the_operator_find_each_other(start: Start) -> None:
    """Of two slices, with rank 0 coming last."""
    port = free_port()
    pods = [
        pod_identity(
            slice_index=slice_index,
            host_index=host_index,
            n_slices=2,
            hosts_per_slice=2,
            coordinator_port=port,
        )
        for slice_index, host_index in ((1, 1), (1, 0), (0, 1), (0, 0))
    ]
    started = [start(pod_environ(identity)) for identity in pods]
    codes = [process.wait(PATIENCE_S) for process, _ in started]
    outputs = [output.read_text() for _, output in started]
    assert codes == [0] * 4, outputs
    assert joined("\n".join(outputs)) == [["cpu", rank, 4, 0] for rank in range(4)]


def test_a_host_that_does_not_come_is_named(start: Start) -> None:
    process, output = start(
        pod_environ(pod_identity(hosts_per_slice=3, coordinator_port=free_port())), timeout_s=5
    )
    assert process.wait(PATIENCE_S) == 1
    assert "rank 0 waits for 2 of 3 hosts: 1, 2; check that their pods run" in output.read_text()


@pytest.mark.parametrize(
    "starter",
    [
        pytest.param([sys.executable], id="alone"),
        pytest.param(
            [sys.executable, "-m", "stepkeeper.launch", "sh", "-c", '"$@"; exit $?', "sh", sys.executable],
            id="shell",
        ),
    ],
)
@pytest.mark.parametrize("how", [[], ["deaf"]], ids=["in Python", "in a C call"])
def test_sigterm_before_there_is_a_manager_ends_a_containers_first_process_with_75(
    tmp_path: Path, starter: list[str], how: list[str]
) -> None:
    """The kernel withholds from the first process what it doesn't handle: it would wait for the kill."""
    word, sign, output = (tmp_path / name for name in ("termination", "builds", "output"))
    pod = pod_environ(pod_identity(termination_file=str(word)))
    first = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", *starter]
    with output.open("w") as stream:
        unshare = subprocess.Popen(
            [*first, str(SCRIPTS / "building.py"), str(sign), *how],
            env={**os.environ, **pod},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        while not sign.exists():
            assert unshare.poll() is None, output.read_text()
            time.sleep(0.05)
        process = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text()
        os.kill(int(process), signal.SIGTERM)
        assert unshare.wait(60) == 75, output.read_text()
    finally:
        unshare.kill()
        unshare.wait()
    said = Termination.from_json(word.read_bytes())
    assert (said.code, said.notice, said.rank) == (75, "sigterm", 0)


def test_torchrun_on_two_nodes_of_two_processes(tmp_path: Path) -> None:
    port = free_port()
    outputs = [tmp_path / f"node-{rank}.txt" for rank in range(2)]
    nodes = []
    try:
        for rank, output in enumerate(outputs):
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--node-rank",
                str(rank),
            ]
            command += ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
            command += [str(SCRIPTS / "joining.py"), str(PATIENCE_S)]
            # As in an operator's pod: torchrun knows the processes, the operator only the pods.
            pod = pod_environ(pod_identity(hosts_per_slice=2, host_index=rank))
            with output.open("w") as stream:
                nodes.append(
                    subprocess.Popen(
                        command, env={**os.environ, **pod}, stdout=stream, stderr=subprocess.STDOUT
                    )
                )
        codes = [node.wait(PATIENCE_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    said = [output.read_text() for output in outputs]
    assert codes == [0, 0], said
    assert joined("\n".join(said)) == [["cpu", rank, 4, rank % 2] for rank in range(4)]
