"""One of several ranks whose copies of tensors differ: python copies.py RANK WORLD_SIZE FOLDER DEVICE."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from stepkeeper.errors import CopiesDifferError, SaveError
from stepkeeper.policy.save import AtSteps
from stepkeeper_planners import SPMDSavePlanner
from stepkeeper_planners.errors import RanksDifferError
from stepkeeper_testing.trainer import join, open_manager

RANK, WORLD_SIZE, FOLDER, DEVICE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]


class Warnings(logging.Handler):
    """Keep the warnings that the first rank's copies are saved."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if "The first rank's copies are saved" in record.getMessage():
            self.found.append(record.getMessage())


@contextmanager
def warned(n_times: int) -> Iterator[None]:
    """Check that rank 0 logs so many warnings of copies, and the other ranks none."""
    handler = Warnings()
    loggers = [logging.getLogger(name) for name in ("stepkeeper", "stepkeeper_planners")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert len(handler.found) == (0 if RANK else n_times), handler.found


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    if DEVICE == "cpu":
        return tensor
    import torch_xla

    there = tensor.to(torch_xla.device())
    torch_xla.sync()
    return there


def restored(root: Path, like: dict[str, Any], step: int | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of the newest commit, which is of `step`."""
    state = {name: to_device(torch.zeros_like(tensor.cpu())) for name, tensor in like.items()}
    with open_manager(root) as manager:
        found = manager.restore(state, strict=False)
    assert found is not None
    assert step in {None, found.step}
    return {name: tensor.cpu() for name, tensor in state.items()}


def first_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the copy of rank 0."""
    copy = tensor.detach().cpu().clone()
    dist.broadcast(copy, 0)
    return copy


def drifting_model() -> tuple[nn.Linear, torch.Tensor]:
    """Return a model that is equal on all ranks, and a copy of its weights."""
    torch.manual_seed(0)
    weights = torch.randn(300, 200)
    model = nn.Linear(200, 300, bias=False)
    model.weight = nn.Parameter(to_device(weights.clone()))
    return model, weights


def drift(model: nn.Linear, weights: torch.Tensor) -> None:
    """Give each rank other weights; the first one keeps them."""
    with torch.no_grad():
        model.weight.copy_(to_device(weights * (1 + 1e-4 * RANK)))


def test_entries_of_dicts_are_the_first_ranks(root: Path) -> None:
    """On devices, training doesn't wait for a comparison: the first save fails."""
    state = {name: to_device(torch.full((300, 200), 10.0 * i + RANK)) for i, name in enumerate("ab")}
    with warned(1), open_manager(root) as manager:
        if DEVICE != "cpu":
            with pytest.raises(CopiesDifferError, match="copies of some tensors differ"):
                manager.save(1, state).result()
        manager.save(2, state).result()
        manager.save(3, state).result()
    assert all(torch.equal(each, first_ranks(state[name])) for name, each in restored(root, state).items())


def test_copies_that_drift_apart_fail_one_save(root: Path) -> None:
    model, weights = drifting_model()
    with warned(1), open_manager(root) as manager:
        manager.save(1, {"model": model}).result()
        drift(model, weights)
        with pytest.raises(CopiesDifferError, match="copies of some tensors differ"):
            manager.save(2, {"model": model}).result()
        manager.save(3, {"model": model}).result()
        manager.save(4, {"model": model}).result()
    found = restored(root, {"model.weight": weights})
    assert torch.equal(found["model.weight"], weights)


def test_a_save_that_waits_for_the_one_that_fails_compares(root: Path) -> None:
    model, weights = drifting_model()
    with warned(1), open_manager(root) as manager:
        manager.save(1, {"model": model}).result()
        drift(model, weights)
        failing, waiting = (manager.save(step, {"model": model}) for step in (2, 3))
        with pytest.raises(CopiesDifferError, match="copies of some tensors differ"):
            failing.result()
        waiting.result()
    assert torch.equal(restored(root, {"model.weight": weights}, 3)["model.weight"], weights)


def test_the_end_saves_again_what_has_failed(root: Path) -> None:
    model, weights = drifting_model()
    with warned(1), open_manager(root, save=AtSteps((1, 2))) as manager:
        manager.step(1, {"model": model})
        drift(model, weights)
        manager.step(2, {"model": model})
    assert torch.equal(restored(root, {"model.weight": weights}, 2)["model.weight"], weights)


def test_with_two_saves_in_flight_the_third_compares_again(root: Path) -> None:
    """Only then do all ranks know that the first one failed."""
    model, weights = drifting_model()
    with warned(1), open_manager(root, max_pending=2) as manager:
        manager.save(1, {"model": model}).result()
        drift(model, weights)
        saves = [manager.save(step, {"model": model}) for step in (2, 3)]
        for save_in_flight in saves:
            with pytest.raises(CopiesDifferError, match="copies of some tensors differ"):
                save_in_flight.result()
        manager.save(4, {"model": model}).result()
        manager.save(5, {"model": model}).result()
    assert torch.equal(restored(root, {"model.weight": weights})["model.weight"], weights)


def test_the_save_of_a_stop_is_one_ranks(root: Path) -> None:
    """No save comes after it that could decide."""
    model, weights = drifting_model()
    with (  # noqa: PT012 — closing it raises
        warned(1),
        pytest.raises(SystemExit),
        open_manager(root, save=AtSteps((1,))) as manager,
    ):
        for step in count(1):
            if step == 2:
                drift(model, weights)
                manager.request_stop()
            if manager.step(step, {"model": model}).stop:
                break
            time.sleep(0.02)  # as long as steps take: ranks that run ahead stop late
    assert step > 1
    assert torch.equal(restored(root, {"model.weight": weights}, step)["model.weight"], weights)


def test_the_end_refuses_what_is_no_copy_and_keeps_the_commit_before(root: Path) -> None:
    model, weights = drifting_model()
    with (  # noqa: PT012 — closing it raises
        warned(0),
        pytest.raises(RanksDifferError, match=r"model\.weight"),
        open_manager(root, save=AtSteps((1,))) as manager,
    ):
        manager.step(1, {"model": model})
        drift(model, weights * (1 - 2 * RANK))
        manager.step(2, {"model": model})
    assert torch.equal(restored(root, {"model.weight": weights}, 1)["model.weight"], weights)


def test_other_seeds_are_refused(root: Path) -> None:
    torch.manual_seed(RANK)
    model = nn.Linear(200, 300)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(to_device(parameter.detach())))
    with warned(0), pytest.raises(SaveError, match="states differ"), open_manager(root) as manager:  # noqa: PT012 — closing it raises
        if DEVICE != "cpu":
            with pytest.raises(CopiesDifferError):
                manager.save(1, {"model": model}).result()
        with pytest.raises(RanksDifferError, match=r"model\.weight \(on ranks? 1") as raised:
            manager.save(2, {"model": model}).result()
        assert set(raised.value.reasons) == {"model.weight", "model.bias"}


def test_statistics_of_ddp_are_one_ranks(root: Path) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40))
    model = nn.parallel.DistributedDataParallel(inner, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(5 + RANK)
    for _ in range(3):
        model(torch.randn(8, 40) + RANK).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with warned(0), open_manager(root) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer}).result()
    names = [f"model.module.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    own = dict(zip(names, inner[1].buffers(), strict=True))
    found = restored(root, own)
    assert all(torch.equal(found[name], first_ranks(tensor)) for name, tensor in own.items())


def test_stages_with_one_name_for_two_states_are_refused(root: Path) -> None:
    """As index-keyed optimizers of two pipeline stages."""
    numbered = {str(i): to_device(torch.full((3, 3), 10.0 * i + RANK)) for i in range(2)}
    state = {"model": {f"layer{RANK}": torch.ones(3, 3)}, "opt": numbered}
    with pytest.raises(CheckpointException) as raised:
        save(state, checkpoint_id=root, planner=SPMDSavePlanner())
    for error, _ in raised.value.failures.values():
        assert isinstance(error, RanksDifferError)
        assert set(error.reasons) == {"opt.0", "opt.1"}
    assert not (root / ".metadata").exists()


def test_dcp_save_writes_the_first_ranks_copies(root: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {"a": torch.full((500, 300), float(RANK)), "b": torch.ones(300, 300)}
    with warned(1):
        save({k: to_device(t) for k, t in state.items()}, checkpoint_id=root, planner=SPMDSavePlanner())
    found = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
    load(found, checkpoint_id=root)
    assert torch.equal(found["a"], torch.zeros(500, 300))
    assert torch.equal(found["b"], state["b"])


def main() -> None:
    join(RANK, WORLD_SIZE, FOLDER)
    tests: Sequence[tuple[str, Callable[[Path], None]]] = [
        (name, test) for name, test in globals().items() if name.startswith("test_")
    ]
    for name, test in tests:
        if len(sys.argv) > 5 and sys.argv[5] not in name:
            continue
        if DEVICE == "cpu" or "ddp" not in name:
            print(name, flush=True)
            test(FOLDER / name)
            dist.barrier()


main()
