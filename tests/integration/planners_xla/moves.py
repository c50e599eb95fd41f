"""Check that a save leaves the tensors of the training alone, and reads them right after a step."""

import warnings
from unittest import mock

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from stepkeeper_planners import SPMDSavePlanner, adapters
from stepkeeper_planners.geometry.layout import Ranks

ALONE = Ranks(rank=0, world_size=1)


def the_original_is_untouched() -> None:
    tensor = torch.arange(256 * 512.0).reshape(256, 512).to("xla")
    xs.mark_sharding(tensor, xs.Mesh(np.arange(4), (2, 2)), (0, None))
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


def a_tensor_is_read_while_its_step_is_on_its_way() -> None:
    mesh = xs.Mesh(np.arange(4), (2, 2))
    work, tensor = torch.ones(256, 256).to("xla"), torch.zeros(256, 256).to("xla")
    for each in (work, tensor):
        xs.mark_sharding(each, mesh, (0, 1))
    torch_xla.sync()
    for number in range(1, 101):
        with torch.no_grad():
            tensor.add_((work @ work)[0, 0] / 256)
        torch_xla.sync()
        assert all(bool((shard == number).all()) for shard in adapters.local_shards(tensor))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    the_original_is_untouched()
    what_is_copied_because_several_processes_hold_it_stays_open()
    a_tensor_is_read_while_its_step_is_on_its_way()
