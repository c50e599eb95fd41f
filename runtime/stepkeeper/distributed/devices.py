"""Find the device that this process trains on, and the backends for its process group."""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stepkeeper.distributed.launchers import read_local_rank

__all__ = ["Hardware", "choose_backend", "find_hardware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device that this process trains on, with its backends."""

    device: torch.device
    backend: str
    """The backends of a process group, by kind of device. Objects and small values always go over gloo."""

    on_tpu: bool
    """True if torch_xla runs on a TPU: then its runtime knows all processes."""


def find_hardware() -> Hardware:
    """Find this process's device, and make it the current one.

    torch_xla is used if it is imported already, or if the environment names its device or a TPU. Otherwise
    the device is torch's own accelerator, if this host has one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and _uses_torch_xla():
        # A device without a number, since a number would make torch_xla decide about SPMD.
        on_tpu = importlib.import_module("torch_xla.runtime").device_type() == "TPU"
        return Hardware(device=torch.device("xla"), backend="gloo", on_tpu=on_tpu)
    if accelerator is None:
        return Hardware(device=torch.device("cpu"), backend="gloo", on_tpu=False)
    index = read_local_rank(os.environ) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    device = torch.device(accelerator.type, index)
    return Hardware(device=device, backend=choose_backend(device), on_tpu=False)


def choose_backend(device: torch.device) -> str:
    """Return a process group's backends: NCCL for CUDA tensors, gloo for those on the CPU, or for all."""
    try:
        own = dist.get_default_backend_for_device(device)
    except ValueError:
        own = "gloo"
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def _uses_torch_xla() -> bool:
    if "torch_xla" in sys.modules:
        return True
    named = "PJRT_DEVICE" in os.environ or any(name.startswith("TPU_") for name in os.environ)
    return named and importlib.util.find_spec("torch_xla") is not None
