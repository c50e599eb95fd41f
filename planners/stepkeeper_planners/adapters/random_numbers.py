"""Read and set the random number generators of devices, if this process uses any. CPU generators are not among them."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["read_accelerator", "read_xla", "seed_accelerator", "set_accelerator", "set_xla"]


def read_accelerator() -> dict[str, Any] | None:
    """Return the states of torch's generators on this process's accelerator; None if it has used none with generators.

    An accelerator that the process hasn't used is left alone: querying it would allocate memory on each of its devices.
    """
    found = _accelerator()
    if found is None:
        return None
    kind, module = found
    if hasattr(module, "get_rng_state_all"):
        current = torch.accelerator.current_device_index()
        return {"kind": kind, "current": current, "states": module.get_rng_state_all()}
    return {"kind": kind, "current": 0, "states": [_current_state(module)]}


def set_accelerator(state: Mapping[str, Any]) -> bool:
    """Set what `read_accelerator` returned. Return False if this process has no such accelerator.

    If this process has as many devices as were saved, and the same one is current, each gets its state back. Otherwise
    only the current device gets one: that of the device that was current.
    """
    found = _accelerator(used=False)
    if found is None or found[0] != state["kind"]:
        return False
    module, states, current = found[1], state["states"], state["current"]
    if not hasattr(module, "get_rng_state_all"):
        # Such a module has saved the current device's state only.
        module.set_rng_state(states[0])
        return True
    own = torch.accelerator.current_device_index()
    if len(states) == torch.accelerator.device_count() and current == own:
        module.set_rng_state_all(states)
    else:
        module.set_rng_state(states[current], own)
    return True


def seed_accelerator(seed: int) -> None:
    """Seed all of torch's generators of this process's accelerator, if it has one."""
    found = _accelerator(used=False)
    if found is not None:
        seed_all = getattr(found[1], "manual_seed_all", None) or found[1].manual_seed
        seed_all(seed)


def read_xla() -> int | None:
    """Return the seed of the next program on XLA devices; None if this process doesn't use any."""
    if not _uses_xla():
        return None
    import torch_xla.core.xla_model as xm

    return int(xm.get_rng_state())


def set_xla(seed: int) -> bool:
    """Set the seed of the next program on XLA devices. Return False if this process doesn't use any."""
    if not _uses_xla():
        return False
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(seed)
    return True


def _uses_xla() -> bool:
    torch_xla = sys.modules.get("torch_xla")
    return torch_xla is not None and bool(torch_xla._XLAC._xla_runtime_is_initialized())  # noqa: SLF001


def _current_state(module: Any) -> Any:
    """Return the state of the current device's generator, by the first interface that torch and the module have."""
    if hasattr(torch.accelerator, "random"):  # since torch 2.14
        return torch.accelerator.random.get_rng_state()
    # Since torch 2.13, TorchTPU's module has this list, and its get_rng_state() only raises.
    if generators := getattr(module, "default_generators", ()):
        return generators[torch.accelerator.current_device_index()].get_state()
    return module.get_rng_state()


def _accelerator(*, used: bool = True) -> tuple[str, Any] | None:
    """Return the kind of the accelerator and torch's module for it; None if there is none with generators.

    If `used`, return it only if this process has used it. Where torch.accelerator has the same function as the module,
    use that: TorchTPU's module refuses some of its own.
    """
    # The accelerator that this torch is built for, even if the machine has none. Looking for one would start its
    # driver, after which the process can't fork.
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "xla":
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return None
    if hasattr(module, "is_initialized") and module.is_initialized():
        return device.type, module
    return None if used or not torch.accelerator.is_available() else (device.type, module)
