"""A restored training runs the programs of one that never stopped: python resuming.py FOLDER few, or MESH MARKS.

Compares losses, programs and device memory over meshes, marks, optimizers and beginnings.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch_xla.runtime as xr
from trainings import OPTIMIZERS, ScaledAdamW, Step, Training, count_compilations, make_training

from stepkeeper_testing.trainer import open_manager

N_STEPS = 6
WIDTH = 256
"""Wide enough that a save cuts the copies of some tensors further on the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
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
    saved_on: tuple[int, ...] | None = None
    """Another mesh, on which it was saved. What nobody marked is open then as before, and XLA shards it for the new
    one: the steps are those of a fresh start."""

    def begin(self, primed: str, mesh_shape: tuple[int, ...] | None = None) -> Training:
        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizer = (OPTIMIZERS | {"syncfree-adamw": ScaledAdamW})[self.optimizer](parameters)
            for group in optimizer.param_groups:
                # No number that a step has as a constant too: torch_xla keeps one buffer for both, until either is
                # loaded.
                group["lr"] = 0.03 if isinstance(group["lr"], float) else torch.tensor(0.03, device="xla")
            return optimizer

        return make_training(mesh_shape or self.mesh_shape, self.marks, make, primed=primed, width=WIDTH)


def check(case: Case, folder: Path) -> list[str]:
    """Compare a training that is saved and restored with one that is neither. Returns what is wrong."""
    root, numbers, is_moved = folder / "root", range(1, N_STEPS + 1), case.saved_on is not None
    # Of the same mesh, it has compiled all that the other ones run.
    fresh = [] if is_moved else (undisturbed := case.begin(case.primed)).run(numbers)
    saving = case.begin(case.primed, case.saved_on)
    at_start_bytes = saving.device_bytes()
    saved = saving.run(numbers[: case.saved_at])
    with open_manager(root, 10**6) as manager:
        manager.save(case.saved_at, saving.state).result()
    kept = saving.values()
    saved += saving.run(numbers[case.saved_at :])
    resumed = case.begin(case.resumed)
    if is_moved:
        undisturbed = case.begin(case.resumed)
        before_bytes = undisturbed.device_bytes()
    else:
        before_bytes = fresh[case.saved_at - 1].device_bytes if case.saved_at else at_start_bytes
    resumed.run(range(90, 90 + case.steps_before))
    placed, n_before = resumed.shardings(), count_compilations()
    with open_manager(root, 10**6) as manager:
        assert manager.restore(resumed.state) is not None
    n_restore, device_bytes = count_compilations() - n_before, resumed.device_bytes()
    is_placed, found = resumed.shardings() == placed, resumed.values()
    if is_moved:
        fresh = undisturbed.run(numbers[case.saved_at :])
    later, wanted = resumed.run(numbers[case.saved_at :]), fresh[0 if is_moved else case.saved_at :]
    n_started, n_resumed = (len({each.program for each in steps}) for steps in (fresh, later))
    wrong = {
        "values differ": not all(torch.equal(found[name], value) for name, value in kept.items()),
        "another program": programs(later) != programs(wanted),
        "more memory": device_bytes > before_bytes,
        # The save above compiled the copy of a snapshot already. It is another one on another mesh, and where the state
        # had a constant.
        "a restore compiled": n_restore > (is_moved or case.optimizer == "adamw-tensor-lr"),
        "more compilations": n_resumed > n_started,
    }
    if is_moved:
        wrong["another sharding"] = not is_placed
    else:
        # Before the first step, torch_xla writes some operations once that it writes twice after a load_state_dict().
        keys, wanted_keys = ([each.key for each in steps] for steps in (later, wanted))
        wrong |= {
            "the save changed the program": programs(saved) != programs(fresh),
            "losses differ": [each.loss for each in later] != [each.loss for each in wanted],
            "another key": case.saved_at > 0 and keys != wanted_keys,
            "more keys": len(set(keys)) > len({each.key for each in fresh}),
        }
    return [f"{what}: {case}" for what, is_so in wrong.items() if is_so]


def programs(steps: Sequence[Step]) -> list[str]:
    return [step.program for step in steps]


def is_another_layout(case: Case) -> bool:
    """Tell whether any marked tensor is divided otherwise: two meshes may lay out all of them alike."""
    there, here = (case.begin("none", mesh_shape).shardings() for mesh_shape in (case.saved_on, None))
    return there != here


def few() -> Iterator[Case]:
    on_4 = partial(Case, mesh_shape=(2, 2))
    yield on_4(marks="weights", optimizer="adamw-capturable")
    yield Case(mesh_shape=(4,), marks="weights", optimizer="sgd-momentum", saved_at=1)
    yield Case(mesh_shape=(2, 1, 2), marks="one weight", optimizer="adamw-tensor-lr")
    yield on_4(marks="weights", optimizer="rmsprop", primed="none")
    yield on_4(marks="weights", optimizer="sgd-momentum", primed="none")
    yield on_4(marks="one weight", optimizer="sgd", saved_at=0)
    for marks in ("weights", "one weight"):
        yield on_4(marks=marks, optimizer="syncfree-adamw", primed="none", resumed="none", steps_before=1)
    yield Case(mesh_shape=(4,), marks="weights", optimizer="adamw-capturable", saved_on=(2, 2))


def every(mesh: str, marks: str) -> Iterator[Case]:
    mesh_shape = tuple(map(int, mesh.split("x")))
    here = partial(Case, mesh_shape=mesh_shape, marks=marks)
    yield from (here(optimizer=optimizer) for optimizer in OPTIMIZERS)
    for optimizer in (
        ("adamw-capturable", "sgd-momentum", "rmsprop") if marks in ("weights", "one weight") else ()
    ):
        yield from (here(optimizer=optimizer, saved_at=saved_at) for saved_at in (0, 1, 5))
        yield here(optimizer=optimizer, primed="none")
        yield here(optimizer=optimizer, primed="theirs", resumed="theirs")
        for primed in ("none", "ours", "theirs"):
            yield here(optimizer=optimizer, primed=primed, resumed=primed, steps_before=2)
    for saved_on, optimizer in product(((4,), (2, 2), (2, 1, 2)), ("adamw-capturable", "sgd-momentum")):
        case = here(optimizer=optimizer, saved_on=saved_on)
        if saved_on != mesh_shape and is_another_layout(case):
            yield case


if __name__ == "__main__":
    xr.use_spmd()
    cases = few() if sys.argv[2] == "few" else every(*sys.argv[2:])
    failures = [
        text for number, case in enumerate(cases) for text in check(case, Path(sys.argv[1]) / str(number))
    ]
    assert not failures, "\n".join(failures)
