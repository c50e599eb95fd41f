"""Do as a user of 4 devices does, through torch_xla's planners and through ours: the same code for both."""

import contextlib
import io
import json
import random
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as theirs
import torch_xla.runtime as xr
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict

import stepkeeper as ours
from stepkeeper_planners import SPMDStager, adapters

Spec = tuple[Any, ...]
MESH_SHAPE: Final = (2, 2)


def sharded(tensor: torch.Tensor, *spec: Any) -> torch.Tensor:
    placed = tensor.to("xla")
    xs.mark_sharding(placed, xs.Mesh(np.arange(4), MESH_SHAPE), spec)
    return placed


def saved(xc: ModuleType, folder: Path, state: dict[str, Any]) -> None:
    save(state, storage_writer=FileSystemWriter(folder), planner=xc.SPMDSavePlanner())


def loaded(xc: ModuleType, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    load(state, storage_reader=FileSystemReader(folder), planner=xc.SPMDLoadPlanner())
    return state


def partial_replication_is_stored(xc: ModuleType, folder: Path) -> str:
    state = {"full": sharded(torch.ones(8, 8), 0, 1), "partial": sharded(torch.ones(8, 8), 0, None)}
    saved(xc, folder, state)
    return " ".join(sorted(FileSystemReader(folder).read_metadata().state_dict_metadata))


def partial_replication_is_restored(xc: ModuleType, folder: Path) -> str:
    source = torch.arange(64.0).reshape(8, 8)
    saved(xc, folder, {"w": sharded(source, None, 1)})
    got = loaded(xc, folder, {"w": sharded(torch.zeros(8, 8), None, 1)})
    return str(torch.equal(got["w"].cpu(), source))


def copies_are_not_moved(xc: ModuleType, _folder: Path) -> str:
    """Measure what comes from the devices of a tensor that two devices each have half of, in its own size."""
    tensor = sharded(torch.ones(1024, 256), 0, None)
    torch_xla.sync()
    met.clear_all()
    if xc is theirs:
        _sharded_cpu_state_dict({"w": tensor})
    else:
        adapters.local_shards(adapters.deduplicate_copies({"w": tensor})["w"])
    return str(met.metric_data("InboundData")[1] / (tensor.numel() * tensor.itemsize))


def a_load_moves_nothing_from_the_devices(xc: ModuleType, folder: Path) -> str:
    """Measure what comes from the devices of a tensor that is being loaded, in its own size."""
    saved(xc, folder, {"w": sharded(torch.ones(1024, 256), (0, 1), None)})
    target = {"w": sharded(torch.zeros(1024, 256), (0, 1), None)}
    torch_xla.sync()
    met.clear_all()
    loaded(xc, folder, target)
    moved = met.metric_data("InboundData")
    return str((moved[1] if moved else 0.0) / (target["w"].numel() * target["w"].itemsize))


def saved_in_the_background(xc: ModuleType, folder: Path) -> str:
    """The state is the one of the call, whatever the training does while it is written."""
    state = {"w": sharded(torch.ones(8), (0, 1))}
    stager = SPMDStager() if xc is ours else None
    saving = async_save(
        state, checkpoint_id=folder, planner=xc.SPMDSavePlanner(), no_dist=True, async_stager=stager
    )
    state["w"].fill_(9.0)
    torch_xla.sync()
    assert isinstance(saving, Future)
    saving.result()
    return str(loaded(xc, folder, {"w": sharded(torch.zeros(8), (0, 1))})["w"].cpu().tolist()[0])


class LosingWriter(FileSystemWriter):
    """Its second thread can't open a file: the disk is full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, thread_count=2)
        self._open, self._refused = self.fs.create_stream, threading.Event()
        self.fs.create_stream = self._refuse_the_second  # type: ignore[method-assign]  # a fault is put in

    def _refuse_the_second(self, path: Any, mode: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            assert self._refused.wait(60), "the second thread has nothing to write"
            return self._open(path, mode)
        self._refused.set()
        raise OSError("no space left on device")


def a_thread_of_the_writer_fails(xc: ModuleType, folder: Path) -> str:
    """Torch's writers keep what a thread raised to themselves."""
    state = {f"layer{i}": torch.ones(100) for i in range(4)}
    with contextlib.redirect_stderr(io.StringIO()):
        save(state, storage_writer=LosingWriter(folder), planner=xc.SPMDSavePlanner())
    return f"committed, {len(list(folder.glob('*.distcp')))} of 2 files"


def random_number_generators(xc: ModuleType, folder: Path) -> str:
    state = {"numpy": np.random.RandomState(3).get_state(), "python": random.Random(3).getstate()}
    saved(xc, folder, state)
    got = loaded(xc, folder, {"numpy": None, "python": None})
    first, second = np.random.RandomState(1), random.Random(1)
    first.set_state(got["numpy"])
    second.setstate(got["python"])
    return str(
        first.rand() == np.random.RandomState(3).rand() and second.random() == random.Random(3).random()
    )


def another_shape(xc: ModuleType, folder: Path) -> str:
    saved(xc, folder, {"w": sharded(torch.arange(8.0), (0, 1))})
    got = loaded(xc, folder, {"w": sharded(torch.zeros(4), (0, 1))})
    return str(got["w"].cpu().tolist())


def another_dtype(xc: ModuleType, folder: Path) -> str:
    saved(xc, folder, {"w": sharded(torch.arange(4.0) + 0.75, (0, 1))})
    got = loaded(xc, folder, {"w": sharded(torch.zeros(4, dtype=torch.int32), (0, 1))})
    return str(got["w"].cpu().tolist())


def two_names_are_missing(xc: ModuleType, folder: Path) -> str:
    saved(xc, folder, {"w": torch.ones(2)})
    return str(loaded(xc, folder, {"first": torch.ones(2), "second": sharded(torch.ones(8), 0)}))


def names_of_stock(xc: ModuleType, folder: Path) -> str:
    save({"a": {"f": 1.0}, "w": torch.ones(2)}, storage_writer=FileSystemWriter(folder))
    return str(loaded(xc, folder, {"a": {"f": 0.0}, "w": torch.zeros(2)})["a"])


def documented_loop(xc: ModuleType, folder: Path) -> str:
    """Trained, saved, and resumed in new objects, as torch_xla's documentation has it."""
    for resume in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to("xla")
        layers: Any = model
        for layer in layers:
            xs.mark_sharding(layer.weight, xs.Mesh(np.arange(4), MESH_SHAPE), (0, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if resume:
            xc.prime_optimizer(optimizer)
            state = loaded(xc, folder, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model.load_state_dict(state["model"])
            break
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8).to("xla")).sum().backward()
            optimizer.step()
            torch_xla.sync()
        # Their planner fails now and then if the step hasn't begun; what is to be seen comes after that.
        xm.wait_device_ops()
        saved(xc, folder, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        want = model.state_dict()["0.bias"].cpu()
    return str(torch.equal(model.state_dict()["0.bias"].cpu(), want))


def manual_sharding(xc: ModuleType, folder: Path) -> str:
    manual = xs.enable_manual_sharding(
        torch.ones(8, 8).to("xla"), (0, 1), mesh=xs.Mesh(np.arange(4), MESH_SHAPE)
    )
    saved(xc, folder, {"w": manual})
    return "stored"


def fewer_rows_than_devices(xc: ModuleType, folder: Path) -> str:
    saved(xc, folder, {"w": sharded(torch.arange(3.0), (0, 1)), "v": sharded(torch.arange(1.0), 0)})
    got = loaded(xc, folder, {"w": sharded(torch.zeros(3), (1, 0)), "v": sharded(torch.zeros(1), (0, 1))})
    return str([got["w"].cpu().tolist(), got["v"].cpu().tolist()])


def tied_tensors_are_written_once(xc: ModuleType, folder: Path) -> str:
    tensor = torch.ones(1 << 20)
    saved(xc, folder, {"embedding": tensor, "head": tensor})
    return str(round(sum(path.stat().st_size for path in folder.glob("*.distcp")) / 2**22))


def primed_parameters_stay(xc: ModuleType, folder: Path) -> str:
    model = torch.nn.Linear(4, 4).to("xla")
    before = model.weight.detach().cpu().clone()
    torch_xla.sync()
    xc.prime_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    return str(torch.equal(model.weight.detach().cpu(), before))


OBSERVED: Final[tuple[Callable[[ModuleType, Path], str], ...]] = (
    partial_replication_is_stored,
    partial_replication_is_restored,
    copies_are_not_moved,
    a_load_moves_nothing_from_the_devices,
    saved_in_the_background,
    a_thread_of_the_writer_fails,
    random_number_generators,
    another_shape,
    another_dtype,
    two_names_are_missing,
    names_of_stock,
    documented_loop,
    manual_sharding,
    fewer_rows_than_devices,
    tied_tensors_are_written_once,
    primed_parameters_stay,
)


def cause_of(error: BaseException) -> str:
    """The error inside the one that torch makes of it."""
    if isinstance(error, CheckpointException):
        error = next(failure[0] for failure in error.failures.values())
    return f"{type(error).__name__}: {error}"


def main(folder: Path) -> None:
    results: dict[str, dict[str, str]] = {}
    for look in OBSERVED:
        results[look.__name__] = {}
        for name, xc in (("theirs", theirs), ("ours", ours)):
            try:
                seen = look(xc, folder / name / look.__name__)
            except (Exception, CheckpointException) as error:
                # What is raised is what is seen.
                seen = cause_of(error)
            results[look.__name__][name] = seen
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    main(Path(sys.argv[1]))
