"""The states that stock releases of torch saved into tests/data/torch_releases, and the script that had them do it.

To add a release, install it with numpy into an environment of its own, and run with that, from the repository's root,

    python tests/property/planners_parts/release_state.py tests/data/torch_releases

It makes the folder of that release anew. It needs nothing of stepkeeper.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

WORLD_SIZE = 2

CUTS: dict[str, Placement] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "too few rows": Shard(0),
    "copies": Replicate(),
}
"""How tensors of `make_whole_state` are divided between two processes."""


def make_state(fill: int = 0) -> dict[str, Any]:
    """Make what one process saves: tensors of many kinds, laid out in many ways, and values."""
    shared = torch.arange(6.0) + fill
    numbers = torch.arange(24) + fill
    return {
        "model": {
            "matrix": numbers.float().reshape(4, 6),
            "transposed": numbers.float().reshape(4, 6).t(),
            "channels last": numbers.float().reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
            "every other row": numbers.reshape(4, 6)[::2],
            "the end of a longer one": numbers[20:],
            "half": numbers.bfloat16(),
            "eighth": numbers.float().to(torch.float8_e4m3fn),
            "unsigned": numbers.to(torch.uint16),
            "bool": numbers % 2 == 0,
            "conjugate": torch.complex(torch.arange(3.0), torch.full((3,), 1.0 + fill)).conj(),
            "number": torch.tensor(3.5 + fill),
            "empty": torch.empty(0, 3),
            "embed": shared,
            "head": shared,
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0 + fill), "exp_avg": torch.full((2, 3), 0.5 + fill)}},
            "param_groups": [{"lr": 0.1 + fill, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
        },
        "layers": [torch.full((2,), fill + 1.0), torch.full((2,), fill + 2.0)],
        "step": 7 + fill,
        "name": f"run {fill}",
        "seen": {"words": ["ä", "b"], "counts": (1, 2 + fill), "raw": b"\0\1"},
    }


def make_whole_state(fill: int = 0) -> dict[str, Any]:
    """Make what two processes save together, whole."""
    numbers = torch.arange(35.0) + fill
    return {
        "rows": numbers.reshape(7, 5),
        "columns": numbers.reshape(5, 7),
        "too few rows": numbers[:5].reshape(1, 5),
        "copies": numbers,
        "transposed": numbers.reshape(5, 7).t(),
        "plain": numbers.bfloat16(),
        "step": 7 + fill,
    }


def make_sharded_state() -> dict[str, Any]:
    line = init_device_mesh("cpu", (WORLD_SIZE,))
    cut = {
        name: distribute_tensor(value.contiguous(), line, [CUTS[name]]) if name in CUTS else value
        for name, value in make_whole_state().items()
    }
    # Its local parts lie the other way round than their shape says.
    return cut | {"transposed": distribute_tensor(cut["transposed"].t().contiguous(), line, [Shard(0)]).t()}


def check_same(found: Any, wanted: Any, path: str = "state") -> None:
    """Check that a state is this one, to the types of its values."""
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        assert torch.equal(found.resolve_conj(), wanted.resolve_conj()), path
    elif isinstance(wanted, dict | list):
        assert len(found) == len(wanted), path
        for key, value in wanted.items() if isinstance(wanted, dict) else enumerate(wanted):
            check_same(found[key], value, f"{path}.{key}")
    else:
        assert (type(found), found) == (type(wanted), wanted), path


def write(folder: Path) -> None:
    """Save all that is in one release's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.save(make_state(), folder / "state.pt")
    save(make_state(), checkpoint_id=str(folder / "one" / "step_7"), no_dist=True)
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, __file__, str(folder), meeting]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(WORLD_SIZE)]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


def write_share(folder: Path, meeting: Path, rank: int) -> None:
    """Save what is sharded, as one of the ranks."""
    store = FileStore(str(meeting / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    save(make_sharded_state(), checkpoint_id=str(folder / "two" / "step_7"))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write(Path(sys.argv[1]) / torch.__version__.partition("+")[0])
    else:
        write_share(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
