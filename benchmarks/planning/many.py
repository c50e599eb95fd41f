"""States of many tensors, beside torch's own functions in one process: a restore, and the first save.

CPU seconds are of this process. The ways take turns, so that other load hits all of them.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from stepkeeper import CheckpointManager, Options, prime_optimizer

OUT: Final = Path(__file__).parents[1] / "results" / "many.json"
_REPEAT: Final = 5
_OPTIONS: Final = Options(stop_on_notice=False)


def main() -> None:
    """Measure, print, and write the results."""
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        store = dist.FileStore(f"{name}/meet", 1)  # type: ignore[attr-defined]  # torch does not list it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for kind, make in STATES.items():
            folder = Path(name) / str(len(results))
            folder.mkdir()
            results.append({"state": kind} | _measured(make(), folder))
            print(", ".join(f"{key}: {value}" for key, value in results[-1].items()), flush=True)
        dist.destroy_process_group()
    machine = {"measured": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count()}
    machine |= {"machine": platform.machine(), "torch": torch.__version__}
    OUT.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n", encoding="utf-8")


def _measured(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measure saves into new roots, then restores of the last one by turns with `torch.load`."""
    taken: dict[str, list[tuple[float, float]]] = {}

    def measure(way: str, call: Callable[[], Any]) -> Any:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        result = call()
        spent = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        taken.setdefault(way, []).append(spent)
        return result

    for number in range(_REPEAT):
        stock = partial(async_save, _opened(state), checkpoint_id=folder / f"dcp{number}")
        measure("async_save", stock).result()
        with CheckpointManager(folder / f"root{number}", save=1, options=_OPTIONS) as manager:
            measure("first_save", partial(manager.save, 1, state)).result()
    torch.save(_opened(state), folder / "x.pt")
    for _ in range(_REPEAT):
        measure("torch_load", partial(_load, state, folder / "x.pt"))
        with CheckpointManager(folder / f"root{_REPEAT - 1}", save=10**9, options=_OPTIONS) as manager:
            measure("restore", partial(manager.restore, state))
    found: dict[str, Any] = {}
    for ours, theirs in (("first_save", "async_save"), ("restore", "torch_load")):
        for index, unit in enumerate(("s", "cpu_s")):
            one, other = (statistics.median(each[index] for each in taken[way]) for way in (ours, theirs))
            found |= {f"{ours}_{unit}": round(one, 3), f"{theirs}_{unit}": round(other, 3)}
            found[f"{ours}_{unit}_ratio"] = round(one / other, 2)
    return found


def _opened(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the state_dict() of each object."""
    return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}


def _load(state: dict[str, Any], path: Path) -> None:
    read = torch.load(path)
    for name, part in state.items():
        if hasattr(part, "load_state_dict"):
            part.load_state_dict(read[name])


def _training() -> dict[str, Any]:
    """Make a model and its AdamW: 2,668 tensors in 205 MB."""
    sizes = (16_000 + number % 7 * 3_200 for number in range(667))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size)) for size in sizes])
    optimizer = torch.optim.AdamW(model.parameters())
    prime_optimizer(optimizer)
    return {"model": model, "optimizer": optimizer}


def _small(n_tensors: int) -> dict[str, Any]:
    return {"t": {f"layers.{number}.some.long.name.weight": torch.randn(256) for number in range(n_tensors)}}


STATES: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "a training of 2,668 tensors, 205 MB": _training,
    "20,000 tensors of 1 kB": lambda: _small(20_000),
    "50,000 tensors of 1 kB": lambda: _small(50_000),
}


if __name__ == "__main__":
    main()
