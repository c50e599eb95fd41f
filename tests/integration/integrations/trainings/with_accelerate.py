"""Train with a loop that is written with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from recording import KINDS, ROOT, Numbers, begin, loss_of, make_net, note_batch, note_end
from torch.amp.grad_scaler import GradScaler

from stepkeeper import CheckpointManager
from stepkeeper.integrations.accelerate import Training

n_workers = begin()
set_seed(5)
with CheckpointManager(ROOT, save=4) as manager:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader="stateful" in KINDS, use_seedable_sampler="seedable" in KINDS
        ),
    )
    if "scaler" in KINDS:
        # Accelerate makes one on accelerators only.
        accelerator.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(
        Numbers(),
        batch_size=2,
        shuffle=True,
        generator=torch.Generator().manual_seed(4) if "generator" in KINDS else None,
        num_workers=n_workers,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    training = Training(accelerator, manager)
    for epoch in training.epochs(3):
        for batch in training.batches(loader):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            scale = accelerator.scaler and accelerator.scaler.get_scale()
            note_batch("train", batch, loss, epoch, schedule.get_last_lr(), scale)
            training.step({"loss": loss.item()})
    note_end(model, training.global_step)
