"""The optimizer steps in place at once after save: python intact_xla.py FOLDER. Says what it found in JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_xla.runtime as xr
from sharded_training import Training

from stepkeeper import CheckpointManager, Options
from stepkeeper.save.snapshot import device, device_pieces
from stepkeeper_planners.adapters import xla


def saved_and_restored(root: Path, budget_bytes: int | None, *, sync: bool = True) -> dict[str, Any]:
    ways.clear()
    training = Training()
    training.step()
    training.step(sync=sync)
    with CheckpointManager(root, options=Options(device_budget_bytes=budget_bytes)) as manager:
        in_flight = manager.save(1, training.state)
        training.step()
        training.step()
        in_flight.result(120)
    undisturbed = Training()
    undisturbed.step()
    undisturbed.step()
    expected = undisturbed.on_host()
    training.scramble()
    with CheckpointManager(str(root), save=10**6) as manager:
        manager.restore(training.state, 1)
    found = training.on_host()
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    return {"wrong": wrong, "tensors": len(expected), "ways": sorted(ways)}


ways: set[str] = set()
"""By which tensors of the newest save have left the devices."""


def note_ways() -> None:
    make = device.DeviceCopies.make_copies

    def noted(copies: device.DeviceCopies, *arguments: Any, **options: Any) -> Any:
        made, rest = make(copies, *arguments, **options)
        ways.update(["copied there"] if made else [], ["moved while waiting"] if rest else [])
        return made, rest

    device.DeviceCopies.make_copies = noted  # type: ignore[method-assign,assignment]  # nothing of ours says which way it was


def refused_once(*_: object, **__: object) -> None:
    xla.start_pending = start
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")


start = xla.start_pending


def main() -> None:
    xr.use_spmd()
    # Small ones, so that everything of any size comes in several.
    vars(device_pieces).update(_PIECE_BYTES=32 * 1024, _WAITED_PIECE_BYTES=160 * 1024)
    vars(device).update(_SMALLEST_LIMIT_BYTES=64 * 1024)
    note_ways()
    folder = Path(sys.argv[1])
    training = Training()
    training.step()
    total_bytes = sum(tensor.numel() * tensor.itemsize for tensor in training.tensors().values())
    budgets = {"all": None, "half": total_bytes // 2, "none": 0}
    said = {name: saved_and_restored(folder / name, budget) for name, budget in budgets.items()}
    said["all, before the loop's own sync"] = saved_and_restored(folder / "pending", None, sync=False)
    xla.start_pending = refused_once
    said["learned"] = saved_and_restored(folder / "learned", None)
    print(json.dumps(said), flush=True)


main()
