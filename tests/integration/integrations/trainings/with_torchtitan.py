"""Train with torchtitan's parts, in the order of its trainer's loop. The trainer itself needs an accelerator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from recording import ROOT, begin, loss_of, make_net, note_batch, note_end
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from typing_extensions import override

from stepkeeper.integrations.torchtitan import Checkpoints

N_STEPS = 18
n_workers = begin()
torch.manual_seed(5)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Endless noisy numbers, which keep their position."""

    def __init__(self) -> None:
        self.position = 0

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            yield torch.full((4,), float(self.position % 22))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Loop:
    """Stands for the trainer, which has its own step and count of tokens saved."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


loop, model = Loop(), make_net()
adam = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
optimizers = OptimizersContainer.Config(param_groups=[adam], implementation="for-loop").build(
    model_parts=[model]
)
schedule = LRSchedulersContainer.Config(warmup_steps=3, decay_ratio=0.5).build(
    optimizers=optimizers, training_steps=N_STEPS
)
loader = ParallelAwareDataloader(
    Stream(), dp_rank=0, dp_world_size=1, batch_size=2, num_workers=n_workers, snapshot_every_n_steps=4
)
checkpointer = Checkpoints.Config(enable=True, folder=Path(ROOT).name, interval=4).build(
    dataloader=loader,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedule,
    states={"train_state": loop},
    sd_adapter=None,
    base_folder=str(Path(ROOT).parent),
)
checkpointer.load(step=-1)
batches = iter(loader)
while loop.step < N_STEPS:
    loop.step += 1
    batch = next(batches)
    loop.ntokens_seen += len(batch)
    optimizers.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    checkpointer.maybe_wait_for_staging()
    optimizers.step()
    schedule.step()
    note_batch("train", batch, loss, loop.step, loop.ntokens_seen, schedule.get_metrics())
    checkpointer.save(loop.step, last_step=loop.step == N_STEPS)
checkpointer.close()
note_end(model, loop.step)
