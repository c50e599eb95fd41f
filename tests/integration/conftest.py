"""What several of these tests share: a script run as all ranks of a small world."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., None]
"""launch(script, world_size, folder, *arguments): every rank ended well."""


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
