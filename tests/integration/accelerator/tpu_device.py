"""Give this process an accelerator "tpu" that is made of Python: its tensors hold their elements in the CPU's.

It is no XLA and no CUDA. As TorchTPU's, its module refuses what torch.accelerator has a function for, and knows the
current device only.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

KIND = "tpu"


class DeviceTensor(torch.Tensor):
    """A tensor on the device. Torch's own part of it has a shape and a dtype, and no memory."""

    elements: torch.Tensor


class Module:
    """What torch.tpu is."""

    def __init__(self) -> None:
        self.default_generators: Sequence[torch.Generator] = [torch.Generator()]

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True  # torch.accelerator asks it

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.default_generators[0].set_state(state)

    def get_rng_state(self) -> torch.Tensor:
        raise RuntimeError("use torch.accelerator")

    device_count = current_device = get_rng_state


def start() -> Module:
    """Register the device, for the whole process."""
    module = Module()
    register: Any = vars(backend_registration)["_setup_privateuseone_for_python_backend"]
    register(KIND, backend_module=module)
    # Torch has no way for Python to tell it a device's generator.
    vars(torch.accelerator)["random"] = SimpleNamespace(get_rng_state=module.default_generators[0].get_state)
    make_library: Any = torch.library.Library
    library = make_library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    torch.library.impl("aten::_copy_from", "privateuseone")(_copy)
    # Torch's own would leave the elements behind.
    torch.library.impl("aten::detach", "privateuseone")(lambda tensor: _on_device(tensor.elements.detach()))
    _LIBRARIES.append(library)
    return module


_LIBRARIES: list[torch.library.Library] = []
"""A library that nobody holds is taken back."""


def _run(operator: Any, *arguments: Any, **options: Any) -> Any:
    """Run the operator on the CPU. What it changes in place, it gives back."""
    own = {
        id(each.elements): each for each in (*arguments, *options.values()) if isinstance(each, DeviceTensor)
    }
    done = operator(*tree_map(_on_cpu, arguments), **tree_map(_on_cpu, options))
    return tree_map(lambda value: own.get(id(value)) if id(value) in own else _on_device(value), done)


def _copy(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _on_cpu(to).copy_(_on_cpu(source), non_blocking)
    return to


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == KIND:
        return torch.device("cpu")
    return value.elements if isinstance(value, DeviceTensor) else value


def _on_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    acc: Any = vars(torch._C)["_acc"]
    tensor = acc.create_empty_tensor(list(value.shape), value.dtype)
    tensor.__class__ = DeviceTensor
    # As torch believes it to be: its own part has no strides of ours.
    tensor.elements = value.contiguous()
    return tensor
