"""Train with Lightning's Trainer, which validates and accumulates gradients."""

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from recording import KINDS, ROOT, Numbers, begin, loss_of, make_net, note_batch, note_end
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from stepkeeper import CheckpointManager
from stepkeeper.integrations.lightning import Checkpoints

n_workers = begin()
# It recommends more workers, for one.
warnings.filterwarnings("ignore", module="lightning")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = loss_of(self.net, batch)
        rate = self.optimizers().param_groups[0]["lr"]
        note_batch("train", batch, loss, self.current_epoch, number, self.global_step, rate)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        loss = loss_of(self.net, batch)
        note_batch("validate", batch, loss, number)
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        if "plateau" not in KINDS:
            schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


with CheckpointManager(ROOT, save=4) as manager:
    seed_everything(5)
    module = Module()
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        accumulate_grad_batches=2,
        val_check_interval=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Checkpoints(manager), EarlyStopping("val_loss", patience=50)],
    )
    loader = StatefulDataLoader if "stateful" in KINDS else DataLoader
    trainer.fit(
        module,
        loader(Numbers(), batch_size=2, shuffle=True, num_workers=n_workers),
        DataLoader(Numbers(), batch_size=6),
    )
    note_end(module, trainer.global_step)
