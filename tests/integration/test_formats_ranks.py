"""Files of other programs in processes of their own: one rank reads for all, and large files need little memory."""

from collections.abc import Callable
from pathlib import Path
from runpy import run_path

import pytest
import torch
from fork_server import ForkServer
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDSavePlanner

RANK = Path(__file__).parent / "formats_ranks" / "rank.py"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("what", "world_size"),
    [
        ("ours", 3),
        ("stock-planner", 2),
        ("refused", 2),
    ],
)
def test_one_rank_reads_for_all(
    what: str, world_size: int, launch: Callable[..., None], tmp_path: Path
) -> None:
    torch.save(run_path(str(RANK))["make_state"](7), tmp_path / "state.pt")
    (tmp_path / "damaged.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:3000])
    launch(RANK, world_size, what, tmp_path)


CONVERT = Path(__file__).parent / "formats_memory" / "convert.py"
LARGEST_BYTES = 64 << 20
N_TENSORS = 8
BUFFERS_BYTES = 48 << 20
"""Of ours and the libraries', and what the interpreter needs to run the code for the first time."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    one = torch.arange(LARGEST_BYTES // 4, dtype=torch.float32).reshape(-1, 1024)
    state = {f"layer{index}": one + index for index in range(N_TENSORS)}
    torch.save(state, folder / "made.pt")
    save_file(state, folder / "made.safetensors")
    writer = FileSystemWriter(folder / "made", sync_files=False)
    save({**state}, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
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
    # Pages of files are the kernel's to drop, so what counts is what belongs to no file.
    assert int(run.stdout) <= LARGEST_BYTES + BUFFERS_BYTES
