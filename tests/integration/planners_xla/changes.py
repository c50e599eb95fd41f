"""Marks of XLA tensors: changes are counted, also those through `data`; looking at them changes and runs nothing."""

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from stepkeeper_planners.adapters.changes import mark_changes


def n_programs() -> int:
    data = met.metric_data("ExecuteTime")
    return 0 if data is None else int(data[0])


def by_copy(weight: torch.Tensor, other: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(other)


def by_copy_of_data(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.data.copy_(other)


def by_another_storage(weight: torch.Tensor, other: torch.Tensor) -> None:
    weight.data = other


def check(swap: Callable[[torch.Tensor, torch.Tensor], None], sharded: bool) -> None:
    model = torch.nn.Linear(8, 8).to("xla")
    if sharded:
        xs.mark_sharding(model.weight, xs.Mesh(np.arange(4), (4, 1), ("data", "model")), ("data", None))
    optimizer = torch.optim.AdamW(model.parameters())
    for synced in (False, True, False):
        optimizer.zero_grad()
        model(torch.ones(4, 8).to("xla")).sum().backward()
        optimizer.step()
        if synced:
            torch_xla.sync()
    weight = model.weight
    alias = weight.detach()
    before = n_programs()
    mark, alias_mark = mark_changes(weight), mark_changes(alias)
    assert n_programs() == before, "the step isn't run to look at it"
    torch_xla.sync()
    with torch.no_grad():
        model(torch.ones(4, 8).to("xla")).sum().item()
    torch_xla.sync()
    weight.cpu()
    assert not mark_changes(weight).differs_from(mark), "an evaluation changes nothing"
    assert not mark_changes(alias).differs_from(alias_mark)
    swap(weight, torch.randn(8, 8).to("xla"))
    assert mark_changes(weight).differs_from(mark), swap.__name__
    torch_xla.sync()
    assert mark_changes(weight).differs_from(mark), swap.__name__
    assert mark_changes(alias).differs_from(alias_mark) == (swap is not by_another_storage)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    for each in (by_copy, by_copy_of_data, by_another_storage):
        for is_sharded in (False, True):
            check(each, is_sharded)
