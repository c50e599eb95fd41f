"""Keys that are numbers, as in an optimizer's own state: names have them as text, states have them as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.formats import checkpoint_to_torch_save


def stepped() -> torch.optim.AdamW:
    weights: list[torch.Tensor] = [torch.nn.Parameter(torch.arange(4.0) + i) for i in range(3)]
    groups: list[dict[str, Any]] = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    for _ in range(2):
        torch.autograd.backward(torch.cat(weights).pow(2).sum())
        optimizer.step()
    return optimizer


def zeroed(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    for tensors in optimizer.state.values():
        for tensor in tensors.values():
            tensor.zero_()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def saved(state: dict[str, Any], folder: Path) -> Path:
    save(state, storage_writer=FileSystemWriter(folder), planner=SPMDSavePlanner(), no_dist=True)
    return folder


def same(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("saved_as", ["object", "dict"])
@pytest.mark.parametrize("loaded_as", ["object", "dict"])
def test_an_optimizers_state_there_and_back(saved_as: str, loaded_as: str, tmp_path: Path) -> None:
    wanted = stepped()
    folder = saved({"optim": wanted if saved_as == "object" else wanted.state_dict()}, tmp_path / "c")
    optimizer = zeroed(stepped())
    state = {"optim": optimizer if loaded_as == "object" else optimizer.state_dict()}
    load(state, storage_reader=FileSystemReader(folder), planner=SPMDLoadPlanner(), no_dist=True)
    if loaded_as == "dict":
        loaded: Any = state["optim"]
        assert list(loaded["state"]) == [0, 1, 2]
        optimizer.load_state_dict(loaded)
    same(optimizer.state_dict(), wanted.state_dict())


def test_a_conversion_has_the_keys_that_the_state_had(tmp_path: Path) -> None:
    wanted = stepped()
    folder = saved({"optim": wanted, "more": {"1": 2, 3: {}, "empty": {}}}, tmp_path / "c")
    checkpoint_to_torch_save(folder, tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt")
    same(state["optim"], wanted.state_dict())
    assert state["more"] == {"1": 2, 3: {}, "empty": {}}
    zeroed(stepped()).load_state_dict(state["optim"])


def test_stock_readers_pass_over_what_is_noted_of_keys(tmp_path: Path) -> None:
    wanted = stepped()
    folder = saved({"optim": wanted.state_dict(), "empty": {}}, tmp_path / "c")
    state = {"optim": zeroed(stepped()).state_dict()}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    same(state["optim"], wanted.state_dict())
    dcp_to_torch_save(folder, tmp_path / "stock.pt")
    stock = torch.load(tmp_path / "stock.pt")
    same(stock["optim"]["state"]["1"]["exp_avg"], wanted.state_dict()["state"][1]["exp_avg"])
    assert set(stock) == {"optim"}
