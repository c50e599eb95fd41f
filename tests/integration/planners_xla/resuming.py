"""A restored training runs the programs of one that never stopped: python resuming.py FOLDER few, or MESH MARKS.

Compares losses, programs and device memory over meshes, marks, optimizers and beginnings.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
import torch_xla.runtime as xr
from priming import KINDS, bare, count_compilations, sharding_of, shardings_of
from torch import nn
from torch_xla.amp import syncfree
from typing_extensions import override

from stepkeeper import CheckpointManager
from stepkeeper_planners import prime_optimizer

_C: Any = torch_xla._XLAC
Spec = tuple[Any, ...]

N_STEPS = 6
WIDTH = 256
"""Wide enough that a save cuts the copies of some tensors further on the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    mesh_shape: tuple[int, ...]
    marks: str
    optimizer: str
    primed: str = "ours"
    """How the undisturbed training began: with our priming, torch_xla's, or none."""
    resumed: str = "ours"
    """How the restored one did."""
    steps_before: int = 0
    """The number of steps that the restored training took before it was restored, as one that goes back has."""
    saved_at: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step ran, and what it left."""

    program: str
    """Its operations, with the shardings of what it reads, each once: as the compiler sees it."""
    key: str
    """torch_xla's hash of it: two programs of one hash are compiled once."""
    loss: str
    device_bytes: int
    shardings: dict[str, str]


def every_weight(n_dims: int) -> dict[str, Spec]:
    specs: list[Spec] = [(0, None), (None, 0), (0, None)] if n_dims == 1 else [(0, 1), (1, 0), (0, None)]
    return {f"{layer}.weight": spec for layer, spec in zip((0, 2, 4), specs, strict=True)}


def everything(n_dims: int) -> dict[str, Spec]:
    return every_weight(n_dims) | {"0.bias": (0,), "2.bias": (None,), "4.bias": (n_dims - 1,)}


OPTIMIZERS = KINDS | {
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    # Otherwise its step writes through masks, for which XLA takes minutes on CPUs.
    "rprop": lambda p: torch.optim.Rprop(p, capturable=True),
    "asgd": torch.optim.ASGD,
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]),
}
"""All of torch's own but LBFGS, which needs a closure, and SparseAdam, which needs sparse gradients."""


class ScaledAdamW(syncfree.AdamW):  # type: ignore[misc]  # torch_xla types it not
    """Gets what a gradient scaler has found, with which it makes other state than torch's."""

    @override
    def step(self, closure: Any = None) -> Any:
        return super().step(closure, found_inf=torch.zeros((), device="xla"))


SCALED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"syncfree-adamw": ScaledAdamW}
"""One that a script steps before a restore, as it can't be primed."""

MARKS: dict[str, Callable[[int], dict[str, Spec]]] = {
    "weights": every_weight,
    "weights and batch": every_weight,
    "one weight": lambda n_dims: {"2.weight": (n_dims - 1, None)},
    "everything": everything,
    "batch": lambda _: {},
}
"""Which parameters are marked, by what it is called. All else is sharded by propagation."""


class Training:
    """A small network whose parameters are marked in one of the ways that users choose."""

    def __init__(self, case: Case, begun: str) -> None:
        torch.manual_seed(1)
        self.case = case
        layers = [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]
        self.model = nn.Sequential(*layers).to("xla")
        self.mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), case.mesh_shape)
        for name, spec in MARKS[case.marks](len(case.mesh_shape)).items():
            xs.mark_sharding(self.model.get_parameter(name), self.mesh, spec)
        self.optimizer = (OPTIMIZERS | SCALED)[case.optimizer](self.model.parameters())
        for group in self.optimizer.param_groups:
            # No number that a step has as a constant too: torch_xla keeps one buffer for both, until either is loaded.
            group["lr"] = 0.03 if isinstance(group["lr"], float) else torch.tensor(0.03, device="xla")
        torch_xla.sync()
        if begun == "ours":
            prime_optimizer(self.optimizer)
        elif begun == "theirs":
            torch_xla_checkpoint.prime_optimizer(self.optimizer)
            torch_xla.sync()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def run(self, numbers: Sequence[int]) -> list[Step]:
        return [self.step(number) for number in numbers]

    def step(self, number: int) -> Step:
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).to("xla")
        if "batch" in self.case.marks:
            xs.mark_sharding(batch, self.mesh, (0, None))
        self.model.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        grads = [bare(p.grad) for p in self.model.parameters() if p.grad is not None]
        tensors = [loss, *self.tensors(), *grads]
        pending = _C._check_tensor_need_materialization(tensors)
        tensors = [tensor for tensor, needed in zip(tensors, pending, strict=True) if needed]
        # What the devices still compute, as what a restore has started, has no buffers, and these don't wait for them.
        xm.wait_device_ops()
        text, key = _C._get_xla_tensors_hlo(tensors), _C._get_graph_hash(tensors).hex()
        torch_xla.sync()
        return Step(
            program="\n".join(sorted(set(re.sub(r"\.\d+", "", text).splitlines()))),
            key=key,
            loss=loss.item().hex(),
            device_bytes=self.device_bytes(),
            shardings=shardings_of((self.model, self.optimizer)),
        )

    def tensors(self) -> list[torch.Tensor]:
        """The parameters and the state's tensors that are on the devices."""
        found: list[torch.Tensor] = list(self.model.parameters())
        found += [
            tensor
            for entry in self.optimizer.state.values()
            for tensor in entry.values()
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "xla"
        ]
        return [bare(tensor).detach() for tensor in found]

    def device_bytes(self) -> int:
        """The memory of these tensors on all devices together."""
        mine = self.tensors()
        placed = [tensor for tensor in mine if _C._get_xla_sharding_spec(tensor)]
        n_bytes = sum(tensor.nbytes for tensor in mine) - sum(tensor.nbytes for tensor in placed)
        xm.wait_device_ops()
        shards = _C._get_local_shards(placed)
        sharded: int = sum(shard.nbytes for one in shards for shard, _ in one)
        return n_bytes * int(self.mesh.size()) + sharded


def check(case: Case, folder: Path) -> list[str]:
    """Compare a training that is saved and restored with one that is neither. Returns what is wrong."""
    uri, numbers = (folder / "root").as_uri(), range(1, N_STEPS + 1)
    undisturbed = Training(case, case.primed)
    at_start = undisturbed.device_bytes()
    fresh = undisturbed.run(numbers)
    before_bytes = fresh[case.saved_at - 1].device_bytes if case.saved_at else at_start
    saving = Training(case, case.primed)
    saved = saving.run(numbers[: case.saved_at])
    with CheckpointManager(uri, 10**6, chkpt_on_preemption=False) as manager:
        assert manager.save(case.saved_at, saving.state, force=True)
    saved += saving.run(numbers[case.saved_at :])
    resumed = Training(case, case.resumed)
    resumed.run(range(90, 90 + case.steps_before))
    n_before = count_compilations()
    with CheckpointManager(uri, 10**6, chkpt_on_preemption=False) as manager:
        assert manager.restore_latest(resumed.state) is not None
    n_restore, device_bytes = count_compilations() - n_before, resumed.device_bytes()
    later, wanted = resumed.run(numbers[case.saved_at :]), fresh[case.saved_at :]
    n_equal = sum(a.loss == b.loss for a, b in zip(wanted, later, strict=True))
    n_started, n_resumed = (len({step.key for step in steps}) for steps in (fresh, later))
    wrong = {
        "the save changed the program": programs(saved) != programs(fresh),
        "losses differ": n_equal < len(later),
        # Before the first step, torch_xla writes some operations once that it writes twice after a load_state_dict().
        "another program": programs(later) != programs(wanted)
        or (case.saved_at > 0 and [step.key for step in later] != [step.key for step in wanted]),
        "more memory": device_bytes > before_bytes,
        # The save above compiled the copy of a snapshot already. It is another one where the state had a constant.
        "a restore compiled": n_restore > (case.optimizer == "adamw-tensor-lr"),
        "more compilations": n_resumed > n_started,
    }
    return named(case, wrong)


def named(case: Case, wrong: dict[str, bool]) -> list[str]:
    return [f"{what}: {case}" for what, is_so in wrong.items() if is_so]


def programs(steps: Sequence[Step]) -> list[str]:
    return [step.program for step in steps]


def check_another_mesh(case: Case, saved_on: tuple[int, ...], folder: Path) -> list[str]:
    """Restore what was saved on another mesh. What nobody marked is as open as before: XLA shards it for the new one.

    So the steps are those of a fresh start. Returns what is wrong.
    """
    saving = Training(replace(case, mesh_shape=saved_on), case.primed)
    saving.run(range(1, case.saved_at + 1))
    uri = (folder / "root").as_uri()
    with CheckpointManager(uri, 10**6, chkpt_on_preemption=False) as manager:
        assert manager.save(case.saved_at, saving.state, force=True)
    fresh, resumed = Training(case, case.resumed), Training(case, case.resumed)
    placed, before_bytes = shardings_of((resumed.model, resumed.optimizer)), resumed.device_bytes()
    n_before = count_compilations()
    with CheckpointManager(uri, 10**6, chkpt_on_preemption=False) as manager:
        assert manager.restore_latest(resumed.state) is not None
    n_restore, device_bytes = count_compilations() - n_before, resumed.device_bytes()
    is_placed = shardings_of((resumed.model, resumed.optimizer)) == placed
    pairs = list(zip(saving.tensors(), resumed.tensors(), strict=True))
    is_equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    steps = range(case.saved_at + 1, N_STEPS + 1)
    started, later = fresh.run(steps), resumed.run(steps)
    n_started, n_resumed = (len({step.program for step in steps}) for steps in (started, later))
    wrong = {
        "values differ": not is_equal,
        "another sharding": not is_placed,
        "another program": programs(later) != programs(started),
        "more memory": device_bytes > before_bytes,
        # The copy of a snapshot, which else the first save compiles.
        "a restore compiled": n_restore > 1,
        "more compilations": n_resumed > n_started,
    }
    return [f"saved on {saved_on}: {text}" for text in named(case, wrong)]


def is_another_layout(case: Case, saved_on: tuple[int, ...]) -> bool:
    """Tell whether any marked tensor is divided otherwise: two meshes may lay out all of them alike."""
    there, here = (
        {name: sharding_of(parameter) for name, parameter in Training(each, "none").model.named_parameters()}
        for each in (replace(case, mesh_shape=saved_on), case)
    )
    return there != here


def few() -> Iterator[Case]:
    yield Case(mesh_shape=(2, 2), marks="weights", optimizer="adamw-capturable")
    yield Case(mesh_shape=(4,), marks="weights", optimizer="sgd-momentum", saved_at=1)
    yield Case(mesh_shape=(2, 1, 2), marks="one weight", optimizer="adamw-tensor-lr")
    yield Case(mesh_shape=(2, 2), marks="weights", optimizer="rmsprop", primed="none")
    yield Case(mesh_shape=(2, 2), marks="weights", optimizer="sgd-momentum", primed="none")
    yield Case(mesh_shape=(2, 2), marks="one weight", optimizer="sgd", saved_at=0)
    for marks in ("weights", "one weight"):
        yield Case(
            mesh_shape=(2, 2),
            marks=marks,
            optimizer="syncfree-adamw",
            primed="none",
            resumed="none",
            steps_before=1,
        )


def every(mesh_shape: tuple[int, ...]) -> Iterator[Case]:
    for marks, optimizer in product(MARKS, OPTIMIZERS):
        yield Case(mesh_shape=mesh_shape, marks=marks, optimizer=optimizer)
    for marks, optimizer in product(
        ("weights", "one weight"), ("adamw-capturable", "sgd-momentum", "rmsprop")
    ):
        for saved_at in (0, 1, 5):
            yield Case(mesh_shape=mesh_shape, marks=marks, optimizer=optimizer, saved_at=saved_at)
        for primed, resumed in (("none", "ours"), ("theirs", "theirs")):
            yield Case(
                mesh_shape=mesh_shape, marks=marks, optimizer=optimizer, primed=primed, resumed=resumed
            )
        for primed in ("none", "ours", "theirs"):
            yield Case(
                mesh_shape=mesh_shape,
                marks=marks,
                optimizer=optimizer,
                primed=primed,
                resumed=primed,
                steps_before=2,
            )


def elsewhere(mesh_shape: tuple[int, ...]) -> Iterator[tuple[Case, tuple[int, ...]]]:
    """Cases on this mesh, each with another one on which it was saved."""
    others = [other for other in ((4,), (2, 2), (2, 1, 2)) if other != mesh_shape]
    for saved_on, marks, optimizer in product(others, MARKS, ("adamw-capturable", "sgd-momentum")):
        case = Case(mesh_shape=mesh_shape, marks=marks, optimizer=optimizer)
        if is_another_layout(case, saved_on):
            yield case, saved_on


def rows(folder: Path, mesh: str, marks: str) -> Iterator[list[str]]:
    mesh_shape = tuple(map(int, mesh.split("x")))
    for number, case in enumerate(case for case in every(mesh_shape) if case.marks == marks):
        yield check(case, folder / str(number))
    for number, (case, saved_on) in enumerate(elsewhere(mesh_shape)):
        if case.marks == marks:
            yield check_another_mesh(case, saved_on, folder / f"other-{number}")


def few_rows(folder: Path) -> Iterator[list[str]]:
    for number, case in enumerate(few()):
        yield check(case, folder / str(number))
    on_another = Case(mesh_shape=(4,), marks="weights", optimizer="adamw-capturable")
    yield check_another_mesh(on_another, (2, 2), folder / "other")


def main(folder: Path, mesh: str, marks: str = "") -> None:
    wrong = [text for row in (rows(folder, mesh, marks) if marks else few_rows(folder)) for text in row]
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    xr.use_spmd()
    main(Path(sys.argv[1]), *sys.argv[2:])
