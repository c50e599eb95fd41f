"""Train a small model, which `stepkeeper run` supervises and `stepkeeper rehearse` preempts."""

import time

import torch

from stepkeeper import CheckpointManager, RandomState, prime_optimizer

with CheckpointManager.from_env(save=20) as manager:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    prime_optimizer(optimizer)  # its state, for a restore to fill
    state = {"model": model, "optimizer": optimizer, "random": RandomState()}
    restored = manager.restore(state)
    for step in range(restored.step + 1 if restored else 1, 201):
        batch = torch.randn(32, 16)  # the random numbers are in the state: the next batch is the right one
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)  # a larger model takes longer
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")
        if manager.step(step, state, {"loss": loss}).stop:
            break
