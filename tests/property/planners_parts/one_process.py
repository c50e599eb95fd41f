"""States that one process saves and loads with the planners, and a net of parameters that look alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.errors import LoadMismatchError


class Net(nn.Module):
    """Three parameters of one shape, which only their names tell apart, and one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.d = nn.Linear(3, 2, bias=False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each: torch.Tensor = self.d(self.c(self.b(self.a(x))))
        return each


def p(net: Net, names: str) -> list[nn.Parameter]:
    return [getattr(net, name).weight for name in names]


def save_state(state: dict[str, Any], folder: Path, planner: SavePlanner | None = None) -> Path:
    writer = FileSystemWriter(folder)
    save(state, storage_writer=writer, planner=planner or SPMDSavePlanner(), no_dist=True)
    return folder


def load_state(state: dict[str, Any], folder: Path, planner: LoadPlanner | None = None) -> None:
    reader = FileSystemReader(folder)
    load(state, storage_reader=reader, planner=planner or SPMDLoadPlanner(), no_dist=True)


def write(folder: Path, **state: object) -> None:
    """Save one level down: at the top, torch's `save` itself calls state_dict()."""
    save_state({"s": state}, folder)


def read(folder: Path, planner: LoadPlanner | None = None, **state: object) -> None:
    load_state({"s": state}, folder, planner)


def refusal(folder: Path, planner: LoadPlanner | None = None, **state: object) -> str:
    """Return the text of the error, which is of no other kind, with which the load is refused."""
    with pytest.raises(CheckpointException) as raised:
        read(folder, planner, **state)
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, LoadMismatchError)
    return str(error)


def same(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
