"""Placements on 4 devices: described without a wait, read, filled, and the same through a clone."""

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from stepkeeper_planners import adapters
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.cover import check_cover
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.saving.assignment import plan_save

ALONE = Ranks(rank=0, world_size=1)


def filled(tensor: torch.Tensor, source: torch.Tensor) -> None:
    layout = adapters.describe("t", tensor, ALONE)
    adapters.fill(tensor, {i: source[box.slices].clone() for i, box in layout.local_boxes(0).items()})


def check(tensor: torch.Tensor, source: torch.Tensor) -> None:
    layout = adapters.describe("t", tensor, ALONE)
    check_cover("t", layout.global_shape, [chunk.box for chunk in layout.chunks])
    shards = adapters.local_shards(tensor)
    assert all(shard.is_contiguous() and shard.device.type == "cpu" for shard in shards)
    for chunk in layout.chunks:
        for owner in chunk.owners:
            assert torch.equal(shards[owner.local_index], source[chunk.box.slices]), (layout, owner)
    written = torch.full_like(source, -1)
    writes = plan_save([layout], {}, ALONE).tensors
    for write in writes:
        written[write.box.slices] = shards[write.local_index]
    assert torch.equal(written, source)
    assert sum(write.box.volume for write in writes) == source.numel()


def sharded_by_the_compiler() -> None:
    """Check tensors that the user left unsharded and that come out of a step in parts."""
    mesh = xs.Mesh(np.arange(4), (2, 2))
    a = torch.ones(8, 8).to("xla")
    xs.mark_sharding(a, mesh, (0, 1))
    left = torch.zeros(8).to("xla")
    torch_xla.sync()
    left.add_((a @ a).sum(0) + torch.arange(8).to("xla"))
    adapters.materialize({"left": left})
    assert adapters.select_sharded({"t": left})
    check(left, torch.arange(8.0) + 64)


def read_at_once() -> None:
    """Right after a sync the step is only on its way."""
    mesh = xs.Mesh(np.arange(4), (2, 2))
    work = torch.ones(256, 256).to("xla")
    tensor = torch.zeros(256, 256).to("xla")
    for each in (work, tensor):
        xs.mark_sharding(each, mesh, (0, 1))
    torch_xla.sync()
    for number in range(1, 101):
        with torch.no_grad():
            tensor.add_((work @ work)[0, 0] / 256)
        torch_xla.sync()
        assert all(bool((shard == number).all()) for shard in adapters.local_shards(tensor))


def manual_is_refused() -> None:
    mesh = xs.Mesh(np.arange(4), (2, 2))
    manual = xs.enable_manual_sharding(torch.ones(8, 8).to("xla"), (0, 1), mesh=mesh)
    with pytest.raises(UnsupportedShardingError, match=r"layer\.weight.*MANUAL"):
        adapters.describe("layer.weight", manual, ALONE)


def no_work_is_caused() -> None:
    import torch_xla.debug.metrics as met

    mesh = xs.Mesh(np.arange(4), (2, 2))
    tensor = torch.ones(64, 64).to("xla")
    xs.mark_sharding(tensor, mesh, (0, 1))
    torch_xla.sync()
    with torch.no_grad():
        tensor.mul_(2)
    met.clear_all()
    layout = adapters.describe("t", tensor, ALONE)
    assert len(layout.chunks) == 4
    assert met.metric_data("ExecuteTime") is None
    assert met.metric_data("ExecuteReplicatedTime") is None
    assert met.metric_data("CompileTime") is None
    assert met.metric_data("TransferFromDeviceTime") is None
    assert torch_xla._XLAC._check_tensor_need_materialization([tensor]) == [True]


if __name__ == "__main__":
    xr.use_spmd()
    sharded_by_the_compiler()
    read_at_once()
    no_work_is_caused()
    manual_is_refused()
