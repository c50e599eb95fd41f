"""What several of these tests share: a script run as all ranks of a small world."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., None]
"""launch(script, world_size, folder, *arguments): every rank ended well."""


OnDevices = Callable[..., str]
"""run_on_devices(script, *arguments, max_isa=None): what the script has said, which ended well."""


@pytest.fixture(params=["AVX2", "SSE4_2"])
def max_isa(request: pytest.FixtureRequest) -> str:
    """The newest instructions that XLA may compile for: with fused multiply-add, and without it.

    A program is fused and contracted, and so rounds, differently for the two. What has equal bits under both has
    them on any CPU that CI may run on, and not by this one's luck. Any x86-64 machine in use has both; where one
    lacks AVX2 it compiles for what it has, and on other processors XLA ignores these names.
    """
    return str(request.param)


@pytest.fixture(scope="session")
def run_on_devices() -> OnDevices:
    return _run_on_devices


def _run_on_devices(
    script: Path, *arguments: object, timeout_s: float = 280, max_isa: str | None = None
) -> str:
    """In a process of its own, in which torch_xla has 4 devices: these are set before it is imported."""
    flags = os.environ.get("XLA_FLAGS", "")
    if max_isa is not None:
        flags += f" --xla_cpu_max_isa={max_isa}"
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def launch() -> Launch:
    return _launch


def _launch(script: Path, world_size: int, *arguments: str | Path, timeout_s: float = 200) -> None:
    """Each rank is `python script RANK WORLD_SIZE ARGUMENT…`. Fails with what the ranks wrote if one ended badly."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(world_size)]
        ranks = []
        try:
            for rank, output in enumerate(outputs):
                command = [sys.executable, str(script), str(rank), str(world_size), *map(str, arguments)]
                with output.open("w") as stream:
                    ranks.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))
            codes = [process.wait(timeout_s) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        said = "\n".join(output.read_text()[-3000:] for output in outputs)
    assert codes == [0] * world_size, said
