"""Code written for torch_xla's CheckpointManager. Which library it runs with is all that differs: `import … as xc`."""

import hashlib
import importlib
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xc: Any = importlib.import_module(sys.argv[1])


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to("xla")
        mesh = xs.Mesh(np.arange(4), (4, 1), ("data", "model"))
        for parameter in self.model.parameters():
            xs.mark_sharding(parameter, mesh, ("data", *(None for _ in parameter.shape[1:])))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        xc.prime_optimizer(self.optim)
        torch_xla.sync()

    def step(self) -> None:
        self.optim.zero_grad()
        self.model(torch.ones(4, 8).to("xla")).sum().backward()
        self.optim.step()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()}

    def digest(self) -> str:
        torch_xla.sync()
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            for tensor in (parameter, self.optim.state[parameter]["momentum_buffer"]):
                found.update(tensor.detach().cpu().numpy().tobytes())
        return found.hexdigest()


def manager_on(root: Path, *arguments: Any, **options: Any) -> Any:
    return xc.CheckpointManager(str(root), *arguments, chkpt_on_preemption=False, **options)


def seen_of_saves(folder: Path) -> dict[str, Any]:
    training, root = Training(1), folder / "saves"
    manager = manager_on(root, 3)
    seen: dict[str, Any] = {"empty": manager.all_steps(), "saves": [], "digests": {}}
    for step in range(8):
        training.step()
        # Before the loop's own sync, where the documentation has it.
        saved = manager.save_async(step, training.state_dict())
        torch_xla.sync()
        seen["saves"].append(saved)
        if saved:
            seen["digests"][step] = training.digest()
    manager.join()
    seen["due"] = [manager.should_save(step) for step in range(7)]
    seen["forced"] = [
        manager.save(7, training.state_dict(), force=True),
        manager.save(8, state_dict=training.state_dict()),
        manager.save(9, training.state_dict(), False),
    ]
    seen["steps"] = manager.all_steps()
    seen["another sees"] = manager_on(root, 3).all_steps()
    names = ("base_path", "save_interval", "max_to_keep", "num_of_threads", "chkpt_on_preemption")
    seen["attributes"] = [str(getattr(manager, name)).replace(str(folder), "") for name in names]
    seen["restored"] = {}
    for step in seen["digests"]:
        other = Training(2)
        state_dict = other.state_dict()
        held = id(state_dict["model"]["0.weight"])
        assert manager_on(root, 3).restore(step, state_dict) is None
        assert id(state_dict["model"]["0.weight"]) == held
        other.model.load_state_dict(state_dict["model"])
        other.optim.load_state_dict(state_dict["optim"])
        seen["restored"][step] = other.digest()
    other = Training(2)
    part = {"model": other.state_dict()["model"]}
    assert manager_on(root, 3).restore(6, part) is None
    other.model.load_state_dict(part["model"])
    seen["only the model"] = other.digest()
    return seen


def seen_of_signatures() -> dict[str, list[Any]]:
    """Names that can be given by place, in their order, and those that need not be given."""
    methods = (
        "__init__",
        "should_save",
        "save",
        "save_async",
        "restore",
        "all_steps",
        "join",
        "reached_preemption",
    )
    found = {}
    for name in methods:
        parameters = inspect.signature(getattr(xc.CheckpointManager, name)).parameters.values()
        found[name] = [
            [each.name, each.default if isinstance(each.default, int) else str(each.default)]
            for each in parameters
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "save_interval"
        ]
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    seen = {
        "signatures": seen_of_signatures(),
        "saves": seen_of_saves(folder),
    }
    (folder / "seen.json").write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    main(Path(sys.argv[2]))
