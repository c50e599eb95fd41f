"""What can't be resumed exactly is refused, with the reason; so is a library that lacks what is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager, RestoreError


def test_accelerate_needs_something_prepared_and_one_loader(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from stepkeeper.integrations.accelerate import Training

    with CheckpointManager(tmp_path / "root") as manager:
        accelerator = accelerate.Accelerator(cpu=True)
        with pytest.raises(ValueError, match="has prepared nothing yet"):
            Training(accelerator, manager)
        model, loader = accelerator.prepare(
            torch.nn.Linear(1, 1),
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1))),
        )
        training = Training(accelerator, manager)
        for _ in training.epochs(1):
            assert len(list(training.batches(loader))) == 4
            with pytest.raises(RuntimeError, match="called twice in one epoch"):
                next(training.batches(loader))
    other: Any = SimpleNamespace(_models=[model])
    with pytest.raises(ImportError, match=r"\._optimizers, which a resume needs: install accelerate 1\.15"):
        Training(other, manager)


def test_transformers_needs_a_trainer_that_it_knows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from stepkeeper.integrations.transformers import train

    manager = CheckpointManager(tmp_path / "root")
    trainer: Any = SimpleNamespace(is_deepspeed_enabled=True)
    with pytest.raises(ValueError, match="only DeepSpeed can save"):
        train(trainer, manager)
    trainer = SimpleNamespace(is_deepspeed_enabled=False, get_batch_samples=None, current_flos=0)
    with pytest.raises(ImportError, match=r"\._load_from_checkpoint, .* install transformers 5\.24"):
        train(trainer, manager)


def test_transformers_refuses_the_state_of_another_commit_than_the_position() -> None:
    pytest.importorskip("transformers")
    from stepkeeper.integrations.transformers import _Checkpoints

    model = torch.nn.Linear(1, 1)
    trainer: Any = SimpleNamespace(
        get_batch_samples=None,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        lr_scheduler=None,
        accelerator=SimpleNamespace(),
        _tr_loss=0,
        _total_loss_scalar=0,
        _globalstep_last_logged=0,
        current_flos=0,
    )
    manager: Any = SimpleNamespace(restore=lambda state: SimpleNamespace(step=4))
    with pytest.raises(RestoreError, match=r"the commit of step 8, .* start again, to resume from step 4"):
        _Checkpoints(trainer, manager, 8).on_train_begin()


def test_lightning_needs_a_loop_and_optimizers_that_it_can_save(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from stepkeeper.integrations.lightning import Checkpoints

    checkpoints = Checkpoints(CheckpointManager(tmp_path / "root"))
    module: Any = None
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(lightning_restore_optimizer=False))
    with pytest.raises(ValueError, match="SimpleNamespace alone can save its optimizers"):
        checkpoints.on_fit_start(trainer, module)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(lightning_restore_optimizer=True), fit_loop=SimpleNamespace()
    )
    with pytest.raises(ImportError, match=r"\.epoch_loop, .* install lightning 2\.6"):
        checkpoints.on_fit_start(trainer, module)
