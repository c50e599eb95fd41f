"""One rank of one load in a process of its own: JSON on standard output.

`python -m benchmarks.loading.measure WHAT RANK WORLD_SIZE KIND MIB FOLDER`, where WHAT is save, ours, reader or dcp.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.loading.states import MIB, make_state
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepkeeper import CheckpointManager, Options
from stepkeeper.dcp import StorageReader


def main(arguments: list[str]) -> None:
    """Load once, or save for both, and print how long that took and what was read."""
    what, kind, folder = arguments[0], arguments[3], Path(arguments[5])
    rank, world_size, mib = int(arguments[1]), int(arguments[2]), int(arguments[4])
    if world_size > 1:
        store = FileStore(str(folder / "ranks"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    state = make_state(kind, mib * MIB, 1 if what == "save" else None)
    manager = CheckpointManager((folder / "ours").as_uri(), save=1, options=Options(stop_on_notice=False))
    if what == "save":
        manager.save(1, state).result()
        dcp_save(state, storage_writer=FileSystemWriter(folder / "dcp", sync_files=True))
        manager.close()
        return
    loads: dict[str, Callable[[], object]] = {
        "ours": lambda: manager.restore(state, 1),
        "reader": lambda: dcp_load(
            state, storage_reader=StorageReader(next((folder / "ours" / "1").iterdir()))
        ),
        "dcp": lambda: dcp_load(state, storage_reader=FileSystemReader(folder / "dcp")),
    }
    if world_size > 1:
        dist.barrier()
    before, cpu_s, began = _read_bytes(), time.process_time(), time.perf_counter()
    loads[what]()
    took_s = time.perf_counter() - began
    result = {
        "took_s": round(took_s, 4),
        "cpu_s": round(time.process_time() - cpu_s, 4),
        "read_bytes": _read_bytes() - before,
    }
    expected = make_state(kind, mib * MIB, 1)
    bits = {name: tensor.view(torch.int32) for name, tensor in state.items()}
    assert all(torch.equal(expected[name].view(torch.int32), bits[name]) for name in bits), "something else"
    print(json.dumps(result))
    manager.close()


def _read_bytes() -> int:
    """Return the bytes that this process has read from files, from the page cache or not."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


if __name__ == "__main__":
    main(sys.argv[1:])
