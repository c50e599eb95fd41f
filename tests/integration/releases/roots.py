"""Resume a root with the library that is on the path: python roots.py ROOT NEWEST FOLLOWING LIBRARY.

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


def resume(root: str, newest: int, following: int) -> None:
    """Restore the newest step (0: there is none), compare each value, and save the following step."""
    model, optimizer, state = make_state(1)
    with CheckpointManager(root, save=1, options=Options(stop_on_notice=False)) as manager:
        restored = manager.restore(state)
        assert (restored.step if restored else 0) == newest
        if newest:
            same_model, same_optimizer, _ = make_state(newest)
            _compare(model.state_dict(), same_model.state_dict())
            _compare(optimizer.state_dict()["state"], same_optimizer.state_dict()["state"])
            assert state["epoch"] == newest
        manager.save(following, make_state(following)[2]).result()


def _compare(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given_root, given_newest, given_following, library = sys.argv[1:]
    assert Path(stepkeeper.__file__).is_relative_to(library), stepkeeper.__file__
    resume(given_root, int(given_newest), int(given_following))
