"""Share processes with torch or torch_xla, the ranks of a small world, and a Cloud TPU service."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from fork_server import TORCH, ForkedProcess, ForkServer
from rank_talk import SILENCE_S, Ranks, ended_at_last

if TYPE_CHECKING:
    # Loading this takes a second, which only the tests that ask for it have to spend.
    from tpuapi.cloud import FakeCloud

_WAITING = Path(__file__).parent / "manager_trainer" / "waiting.py"
DEVICES = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}

Launch = Callable[..., None]
"""launch(script, world_size, *arguments): every rank ended well."""

OnDevices = Callable[..., str]
"""run_on_devices(script, *arguments, max_isa=None): what the script has said, which ended well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on torch_xla's devices: with another torch it is left out."""
    for item in items:
        if "devices_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xla)


@pytest.fixture(params=["AVX2", "SSE4_2"])
def max_isa(request: pytest.FixtureRequest) -> str:
    """The newest instructions that XLA may compile for: with fused multiply-add, and without it.

    A program is fused and contracted, and so rounds, differently for the two. What has equal bits under both has
    them on any CPU that CI may run on, and not by this one's luck. Any x86-64 machine in use has both; where one
    lacks AVX2 it compiles for what it has, and on other processors XLA ignores these names.
    """
    return str(request.param)


@pytest.fixture(scope="session")
def devices_server() -> Iterator[ForkServer]:
    """Start one whose processes have torch_xla with 4 devices, which are set before it is imported."""
    with closing(
        ForkServer(*TORCH, "torch_xla.runtime", "torch_xla.distributed.spmd", env=DEVICES)
    ) as server:
        yield server


@pytest.fixture(scope="session")
def run_on_devices(devices_server: ForkServer) -> OnDevices:
    def run(script: Path, *arguments: object, timeout_s: float = 280, max_isa: str | None = None) -> str:
        env = None
        if max_isa is not None:
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={max_isa}"
            env = {**os.environ, **DEVICES, "XLA_FLAGS": flags.strip()}
        done = devices_server.run([script, *arguments], env=env, timeout=timeout_s)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


@pytest.fixture
def ranks(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> Ranks:
    @contextmanager
    def ranks(
        case: str, world_size: int = 1, folder: Path = tmp_path, **options: Any
    ) -> Iterator[list[ForkedProcess]]:
        said = json.dumps({"silence_s": SILENCE_S, **options})
        with ExitStack() as stack:
            logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
            processes = [
                torch_servers[rank % 2].start(
                    [_WAITING, folder, rank, world_size, case, said],
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
                for rank, log in enumerate(logs)
            ]
            # pytest shows it where the test fails.
            stack.callback(_print_ends, logs)
            stack.enter_context(ended_at_last(processes))
            yield processes

    return ranks


def _print_ends(logs: Sequence[IO[str]]) -> None:
    for rank, log in enumerate(logs):
        log.seek(0)
        print(f"--- rank {rank} ---\n{log.read()[-3000:]}")


@pytest.fixture
def launch(torch_servers: tuple[ForkServer, ForkServer]) -> Launch:
    return _launch_on(torch_servers)


@pytest.fixture
def launch_on_devices(devices_server: ForkServer) -> Launch:
    """Each rank has XLA devices of its own, and a program of its own."""
    return _launch_on((devices_server, devices_server))


def _launch_on(servers: tuple[ForkServer, ForkServer]) -> Launch:
    def launch(script: Path, world_size: int, *arguments: object) -> None:
        """Run `script RANK WORLD_SIZE ARGUMENT…` as each rank. Fails with what the ranks wrote if one ended badly."""
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / f"{rank}.txt" for rank in range(world_size)]
            ranks: list[ForkedProcess] = []
            try:
                for rank, output in enumerate(outputs):
                    command = [script, rank, world_size, *arguments]
                    with output.open("w") as stream:
                        server = servers[rank % 2]
                        ranks.append(server.start(command, stdout=stream, stderr=subprocess.STDOUT))
                codes = [process.wait(200) for process in ranks]
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
            said = "\n".join(output.read_text()[-3000:] for output in outputs)
        assert codes == [0] * world_size, said

    return launch


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file; companions write no data while it is there."""
    file, own = tmp_path / "hold", Path(__file__).parent / "held_companions"
    monkeypatch.setenv("STEPKEEPER_TEST_HOLD_FILE", str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")]))
    return file


@pytest.fixture
def folder_with_room(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system that has room however full this machine's disk is: a local tier leaves a part of it free."""
    folder = tmp_path / "room"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g,mode=0700", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        # Lazily: a process that a failed test has left may still hold a file there.
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def tpu() -> "FakeCloud":
    """A Cloud TPU service whose time stands still until the test steps it."""
    from tpuapi.cloud import FakeCloud

    return FakeCloud()
