"""Save and restore what lies on an accelerator: python training.py FOLDER."""

import sys
from pathlib import Path
from typing import Any

import torch
import tpu_device

from stepkeeper import CheckpointManager, Options, RandomState
from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.state.tree import flatten_state


def make_state(fill: float) -> dict[str, Any]:
    shared = torch.full((5,), fill).to("tpu")
    return {
        "model": {
            "matrix": (torch.arange(12.0).reshape(3, 4) + fill).to("tpu"),
            "turned": (torch.arange(12.0).reshape(3, 4) + fill).to("tpu").t(),
            "part": (torch.arange(12) + int(fill)).to("tpu")[3:7],
            "half": torch.full((3,), fill, dtype=torch.bfloat16).to("tpu"),
            "number": torch.tensor(fill).to("tpu"),
            "empty": torch.empty(0, 3).to("tpu"),
            "embed": shared,
            "head": shared,
            "on the host": torch.full((2,), fill),
        },
        "step": int(fill),
    }


def check_state(found: dict[str, Any], fill: float) -> None:
    for name, wanted in make_state(fill)["model"].items():
        assert found["model"][name].device == wanted.device, name
        assert torch.equal(found["model"][name].cpu(), wanted.cpu()), name
    assert found["step"] == int(fill)


def manage(root: Path) -> None:
    assert flatten_state(make_state(1.0)).aliases == {"model.head": "model.embed"}
    with CheckpointManager(root.as_uri(), save=1, options=Options(stop_on_notice=False)) as manager:
        state = make_state(1.0)
        manager.save(1, state)
        state["model"]["matrix"].fill_(99.0)  # while the save may still be under way
        manager.wait()
        manager.save(2, make_state(2.0)).result()
    state = make_state(0.0)
    with CheckpointManager(root.as_uri(), save=1, options=Options(stop_on_notice=False)) as manager:
        restored = manager.restore(state)
        assert restored is not None
        check_state(state, 2.0)
        manager.restore(state, 1)
    check_state(state, 1.0)


def draw(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


def keep_random_numbers(root: Path, module: tpu_device.Module) -> None:
    (generator,) = module.default_generators
    generator.manual_seed(5)
    with CheckpointManager(root.as_uri(), save=1, options=Options(stop_on_notice=False)) as manager:
        manager.save(1, {"w": torch.zeros(1), "random": RandomState()}).result()
        wanted = draw(generator)
        assert draw(generator) != wanted
        manager.restore({"w": torch.zeros(1), "random": RandomState()}, 1)
    assert draw(generator) == wanted


def prime(module: tpu_device.Module) -> None:
    weight = torch.nn.Parameter(torch.ones(3).to("tpu"))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
    before = module.default_generators[0].get_state()
    prime_optimizer(optimizer)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"].cpu(), torch.zeros(3))
    assert torch.equal(module.default_generators[0].get_state(), before)


def main(folder: Path) -> None:
    module = tpu_device.start()
    found = torch.accelerator.current_accelerator()
    assert found is not None
    assert found.type == "tpu"
    manage(folder / "managed")
    keep_random_numbers(folder / "random", module)
    prime(module)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
