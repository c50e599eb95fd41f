"""A conversion needs memory for a tensor and a buffer, however large the file is."""

from pathlib import Path

import pytest
from fork_server import ForkServer

CONVERT = Path(__file__).parent / "formats_memory" / "convert.py"
LARGEST_BYTES = 64 << 20
FILE_BYTES = 512 << 20
BUFFERS_BYTES = 48 << 20
"""Of ours and the libraries', and what the interpreter needs to run the code for the first time."""


@pytest.fixture(scope="module")
def files(torch_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    made = torch_server.run([CONVERT, "make", folder, FILE_BYTES, LARGEST_BYTES])
    assert made.returncode == 0, made.stderr[-4000:]
    return folder


@pytest.mark.parametrize(
    ("call", "src"),
    [
        ("torch_save_to_checkpoint", "made.pt"),
        ("checkpoint_to_torch_save", "made"),
        ("safetensors_to_checkpoint", "made.safetensors"),
        ("checkpoint_to_safetensors", "made"),
    ],
)
def test_peak_memory_is_a_tensor_and_a_buffer(
    torch_server: ForkServer, call: str, src: str, files: Path, tmp_path: Path
) -> None:
    run = torch_server.run([CONVERT, call, files / src, tmp_path / "converted"])
    assert run.returncode == 0, run.stderr[-4000:]
    grown_bytes = int(run.stdout)
    # Pages of files are the kernel's to drop, so what counts is what belongs to no file.
    assert grown_bytes <= LARGEST_BYTES + BUFFERS_BYTES
