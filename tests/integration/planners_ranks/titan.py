"""One of several ranks, saving and loading as torchtitan does: python titan.py RANK WORLD_SIZE FOLDER STAGES ACTION….

Objects that wrap the model, the optimizer, the schedule and the data's position, flat under one name each; every
pipeline stage has only its own layers. Actions: save, async_save, load, each with a name; those named by_stepkeeper
are done with stepkeeper's storage and stager.
"""

import pickle
import sys
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from stepkeeper.dcp import Stager, StorageReader, StorageWriter
from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_testing.trainer import join

N_LAYERS = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Part(nn.Module):
    """The layers of one pipeline stage, under their names in the whole model."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(6, 6) for layer in layers})
        self.norm = nn.LayerNorm(6) if N_LAYERS - 1 in layers else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.relu(layer(x))
        return x if self.norm is None else self.norm(x)


class ModelWrapper:
    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.part)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.part, state, options=StateDictOptions(strict=False))


class OptimizerWrapper:
    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.part, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.part, self.optimizer, state, options=FLAT)


class Dataloader:
    """A position for each data-parallel rank, pickled, under the rank's own name."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self.name = f"dp_rank_{dp_rank}"
        self.dp_size = dp_size
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {self.name: pickle.dumps({"position": self.position}), "world_size": self.dp_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["world_size"] == self.dp_size
        self.position = pickle.loads(state[self.name])["position"]


class Trainer:
    def __init__(self, world_size: int, stages: int) -> None:
        mesh = init_device_mesh("cpu", (stages, world_size // stages), mesh_dim_names=("pp", "dp"))
        stage, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        per_stage = N_LAYERS // stages
        self.part = Part(range(stage * per_stage, (stage + 1) * per_stage))
        fully_shard(self.part, mesh=mesh["dp"])
        optimizer = OptimizerWrapper(self.part)
        self.optimizer = optimizer.optimizer
        self.loader = Dataloader(dp_rank, world_size // stages)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        self.step = 0
        self.states: dict[str, Any] = {
            "train_state": self,
            "model": ModelWrapper(self.part),
            "optimizer": optimizer,
            "lr_scheduler": self.schedule,
            "dataloader": self.loader,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": torch.tensor(self.step * 100)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        assert state["ntokens_seen"].item() == self.step * 100

    def train(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.optimizer.zero_grad()
            torch.autograd.backward(self.part(torch.rand(3, 6)).square().sum())
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            self.loader.position += 7

    def whole(self) -> dict[str, Any]:
        """Gather what this stage has, in memory of its own."""
        found: dict[str, Any] = {}
        for kind in ("model", "optimizer"):
            for name, value in self.states[kind].state_dict().items():
                full = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{kind}.{name}"] = full.detach().clone() if isinstance(full, Tensor) else full
        return found


def check(trainer: Trainer, folder: Path) -> None:
    """The trainer is at what was saved, to the bit."""
    saved: dict[str, Any] = {}
    for path in folder.glob("stage*.pt"):
        saved |= torch.load(path, weights_only=True)
    for name, value in trainer.whole().items():
        same = torch.equal(value, saved[name]) if isinstance(value, Tensor) else value == saved[name]
        assert same, f"{name}: {value} instead of {saved[name]}"
    assert (trainer.step, trainer.loader.position) == (3, 21)
    assert trainer.schedule.last_epoch == 3


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    stages, actions = int(sys.argv[4]), sys.argv[5:]
    join(rank, world_size, folder)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    for action in actions:
        torch.manual_seed(len(action))
        trainer = Trainer(world_size, stages)
        verb, _, name = action.partition(":")
        writer, reader, stager = None, None, None
        if name == "by_stepkeeper":
            writer, reader, stager = StorageWriter(), StorageReader(), Stager()
        checkpoint = str(folder / name)
        if verb == "load":
            trainer.train(1)
            load(trainer.states, checkpoint_id=checkpoint, storage_reader=reader, planner=SPMDLoadPlanner())
            check(trainer, folder)
            continue
        trainer.train(3)
        reference = trainer.whole()
        if verb == "save":
            save(trainer.states, checkpoint_id=checkpoint, storage_writer=writer, planner=SPMDSavePlanner())
        else:
            future = async_save(
                trainer.states,
                checkpoint_id=checkpoint,
                storage_writer=writer,
                process_group=group,
                async_stager=stager,
                planner=SPMDSavePlanner(process_group=group),
            )
            # The training goes on, with collectives of its own, while it is saved.
            trainer.train(4)
            assert isinstance(future, Future)
            future.result()
        if rank % (world_size // stages) == 0:
            torch.save(reference, folder / f"stage{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
