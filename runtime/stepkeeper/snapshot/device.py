"""The little that the runtime itself asks of torch_xla. It is imported only where tensors of it exist."""

from collections.abc import Mapping

import torch

from stepkeeper_planners import adapters

__all__ = ["clone_on_device", "run_pending"]


def clone_on_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the XLA tensors among `tensors`, on their devices; the copying was dispatched.

    What several devices hold alike is in the copies on one device only, where that is worth it.
    """
    clones = {fqn: adapters.clone_to_move(fqn, t) for fqn, t in tensors.items() if t.device.type == "xla"}
    if clones:
        _sync()
    return clones


def run_pending(tensors: Mapping[str, torch.Tensor]) -> None:
    """What was put into XLA tensors is in them, not in a program that the first training step would become part of.

    A step that is compiled together with leftovers of a restore may round differently than the same step in an
    undisturbed run.
    """
    if any(tensor.device.type == "xla" for tensor in tensors.values()):
        _sync()


def _sync() -> None:
    """Pending work was started. The device's random numbers go on as if there had been no such call.

    Every sync draws a new seed for the next program: left like that, a training that saves would draw other
    dropout masks than one that doesn't.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    seed = xm.get_rng_state()
    torch_xla.sync()
    xm.set_rng_state(seed)
