"""Check what a save moves from the devices, and that it leaves the training alone."""

import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDSavePlanner, adapters
from stepkeeper_planners.geometry.layout import Ranks

ALONE = Ranks(rank=0, world_size=1)


def metric(name: str) -> Any:
    return met.metric_data(name) or (0, 0)


def partly_replicated() -> torch.Tensor:
    tensor = torch.arange(256 * 512.0).reshape(256, 512).to("xla")
    xs.mark_sharding(tensor, xs.Mesh(np.arange(4), (2, 2)), (0, None))
    return tensor


def size_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def each_byte_once(folder: Path) -> None:
    state: dict[str, Any] = {f"layer{i}": partly_replicated() for i in range(6)}
    torch_xla.sync()
    xm.wait_device_ops()
    met.clear_all()
    save(state, storage_writer=FileSystemWriter(folder), planner=SPMDSavePlanner())
    assert metric("InboundData")[1] == size_bytes(state.values())
    # One program for all of them, and none the next time.
    assert metric("CompileTime")[0] == 1
    save(state, storage_writer=FileSystemWriter(folder / "again"), planner=SPMDSavePlanner())
    assert metric("CompileTime")[0] == 1


def the_original_is_untouched() -> None:
    tensor = partly_replicated()
    torch_xla.sync()
    before, pending = torch_xla._XLAC._get_xla_sharding_spec(tensor), tensor * 3
    seed = xm.get_rng_state()
    cut = adapters.deduplicate_copies({"t": tensor})["t"]
    assert torch_xla._XLAC._get_xla_sharding_spec(tensor) == before
    assert torch_xla._XLAC._check_tensor_need_materialization([pending, tensor]) == [True, False]
    assert xm.get_rng_state() == seed
    # It is a copy: what happens to the tensor later doesn't reach it.
    with torch.no_grad():
        tensor.zero_()
    torch_xla.sync()
    chunks = adapters.describe("t", cut, ALONE).chunks
    assert [len(chunk.owners) for chunk in chunks] == [1, 1, 1, 1]
    shards = adapters.local_shards(cut)
    source = torch.arange(256 * 512.0).reshape(256, 512)
    for chunk in chunks:
        assert torch.equal(shards[chunk.owners[0].local_index], source[chunk.box.slices])


def what_is_copied_because_several_processes_hold_it_stays_open() -> None:
    """Without a sharding it lies on all devices, and with two processes a save would move it twice."""
    tensor = torch.arange(256 * 512.0).reshape(256, 512).to("xla")
    torch_xla.sync()
    planner = SPMDSavePlanner()
    with mock.patch.object(xr, "process_count", return_value=2):
        planner.set_up_planner({"t": tensor}, is_coordinator=True)
    assert planner._write_data._copied == {"t"}
    assert torch_xla._XLAC._get_xla_sharding_spec(tensor) == ""
    assert torch_xla._XLAC._get_xla_sharding_spec(tensor) == "", "the second answer is the up-to-date one"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    each_byte_once(Path(sys.argv[1]) / "once")
    the_original_is_untouched()
    what_is_copied_because_several_processes_hold_it_stays_open()
