"""Save or restore a root with the library that is on the path: python roots.py save|restore ROOT STEP LIBRARY.

Run by the library of a release, and by that of this tree.
"""

import sys
import warnings
from pathlib import Path

import torch

import stepkeeper
from stepkeeper import CheckpointManager, Options

State = dict[str, object]


def make_state(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, State]:
    """Train a model to the step, each with other values, so that a wrong step shows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(step):
        optimizer.zero_grad()
        model(torch.randn(32, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer, {"model": model, "optimizer": optimizer, "epoch": step}


def save(root: str, step: int) -> None:
    """Continue from the newest step if there is one, and save the next."""
    _, _, state = make_state(step)
    with CheckpointManager(root, save=1, options=Options(stop_on_notice=False)) as manager:
        manager.restore(make_state(1)[2])
        manager.save(step, state).result()


def restore(root: str, step: int) -> None:
    """Restore the newest step, which must be this one, and compare each value."""
    model, optimizer, state = make_state(1)
    with CheckpointManager(root, save=1, options=Options(stop_on_notice=False)) as manager:
        restored = manager.restore(state)
    assert restored is not None
    assert restored.step == step
    same_model, same_optimizer, _ = make_state(step)
    torch.testing.assert_close(model.state_dict(), same_model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(
        optimizer.state_dict()["state"], same_optimizer.state_dict()["state"], rtol=0, atol=0
    )
    assert state["epoch"] == step


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    command, given_root, given_step, library = sys.argv[1:]
    assert Path(stepkeeper.__file__).is_relative_to(library), stepkeeper.__file__
    {"save": save, "restore": restore}[command](given_root, int(given_step))
