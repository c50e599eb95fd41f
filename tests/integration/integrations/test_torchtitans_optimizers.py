"""Checkpoints with optimizers are read both ways: by torchtitan's own container, and by ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW, Optimizer

from stepkeeper import CheckpointManager, Options, SPMDLoadPlanner, prime_optimizer
from stepkeeper.dcp import StorageReader

OPTIONS = Options(stop_on_notice=False)
NAMES = [f"{number}.{name}" for number in (0, 1) for name in ("weight", "bias")]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def make_container(model: nn.Module) -> Any:
    """Construct torchtitan's container: biases without decay, in a group of their own."""
    optimizer = pytest.importorskip(
        "torchtitan.components.optimizer", reason="the newest torch has torchtitan"
    )
    group = optimizer.ParamGroupConfig
    groups = [
        group(pattern=r"bias$", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.25, "weight_decay": 0.0}),
        group(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.5, "weight_decay": 0.125}),
    ]
    container = optimizer.OptimizersContainer
    return container(container.Config(param_groups=groups, implementation="for-loop"), model_parts=[model])


def make_plain(model: nn.Module) -> Optimizer:
    """Construct what a script without torchtitan has, with groups and parameters in another order."""
    parts = dict(model.named_parameters())
    weights = {"params": [parts["1.weight"], parts["0.weight"]], "lr": 0.5, "weight_decay": 0.125}
    biases = {"params": [parts["1.bias"], parts["0.bias"]], "lr": 0.25, "weight_decay": 0.0}
    return AdamW([weights, biases], foreach=False)


def train(model: nn.Module, optimizer: Any) -> None:
    """Take two steps, with other gradients for each parameter."""
    for step in (1, 2):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, step + 0.125 * number)
        optimizer.step()


def everything(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return the rate, the decay and the moments of each parameter by its name."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(parameter is each for each in group["params"]):
                    found[name] = (group["lr"], group["weight_decay"], dict(optimizer.state[parameter]))
    return found


@pytest.mark.parametrize(
    "spoil", [lambda optimizer: None, lambda optimizer: train(*optimizer)], ids=["new", "used"]
)
def test_torchtitan_reads_ours(spoil: Callable[[Any], None], tmp_path: Path) -> None:
    ours, theirs = make_model(), make_model()
    optimizer, container = make_plain(ours), make_container(theirs)
    train(ours, optimizer)
    with CheckpointManager(tmp_path, save=1, options=OPTIONS) as manager:
        manager.save(1, {"model": ours, "optimizer": optimizer}).result()
    with CheckpointManager(tmp_path, save=1, options=OPTIONS) as manager:
        restored = manager.restore({"model": make_model()}, items=["model"])
    assert restored is not None
    spoil((theirs, container))
    load({"optimizer": container}, storage_reader=StorageReader(restored.uri), no_dist=True)
    wanted = everything(ours, [optimizer])
    assert sorted(wanted) == sorted(NAMES)
    torch.testing.assert_close(everything(theirs, container.optimizers), wanted, rtol=0, atol=0)


def test_ours_reads_torchtitans(tmp_path: Path) -> None:
    """Into its own container, and into an optimizer, which is one level down: dcp.load replaces those at the top."""
    state: dict[str, Any]
    theirs, same, ours = make_model(), make_model(), make_model()
    container, again, optimizer = make_container(theirs), make_container(same), make_plain(ours)
    train(theirs, container)
    wanted = everything(theirs, container.optimizers)
    save({"model": theirs, "optimizer": container}, checkpoint_id=tmp_path / "top", no_dist=True)
    state = {"model": same, "optimizer": again}
    load(state, checkpoint_id=tmp_path / "top", planner=SPMDLoadPlanner(), no_dist=True)
    torch.testing.assert_close(everything(same, again.optimizers), wanted, rtol=0, atol=0)

    below = {"state": {"model": theirs.state_dict(), "optimizer": container.state_dict()}}
    save(below, checkpoint_id=tmp_path / "below", no_dist=True)
    prime_optimizer(optimizer)
    state = {"state": {"model": ours, "optimizer": optimizer}}
    load(state, checkpoint_id=tmp_path / "below", planner=SPMDLoadPlanner(), no_dist=True)
    torch.testing.assert_close(everything(ours, [optimizer]), wanted, rtol=0, atol=0)
