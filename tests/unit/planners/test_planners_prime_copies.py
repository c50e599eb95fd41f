"""Optimizers that keep copies of the parameters in their state: priming keeps what these copies say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.errors import PrimeError


class OfEachParameter(Optimizer):
    """Updates one parameter after another, each with its own state."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], group)

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class MasterWeights(OfEachParameter):
    """Float32 weights beside low-precision ones, with a momentum and weight decay."""

    def __init__(self, params: Any, decay_name: str = "weight_decay") -> None:
        super().__init__(params, {"lr": 0.1, decay_name: 0.01})
        self.decay_name = decay_name

    @override
    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["master"] = p.detach().float().clone()
            state["momentum"] = torch.zeros_like(state["master"])
        gradient = p.grad.float() + group[self.decay_name] * state["master"]
        state["momentum"].mul_(0.9).add_(gradient)
        state["master"].sub_(group["lr"] * state["momentum"])
        p.copy_(state["master"])


class Preconditioned(OfEachParameter):
    """A matrix that is no constant, but has nothing of the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @override
    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("left", 0.5 * torch.eye(len(p))).add_(p.grad @ p.grad.T)
        p.sub_(group["lr"] * state["left"] @ p.grad)


def weights(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 3), (4, 2), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def trained(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize(
    ("make", "dtype", "count"),
    [
        (MasterWeights, torch.bfloat16, 3),
        (MasterWeights, torch.float32, 3),
        (Preconditioned, torch.float32, 2),
        (torch.optim.ASGD, torch.float32, 3),
    ],
)
def test_training_goes_on_as_without_it(
    make: Callable[[Any], Optimizer], dtype: torch.dtype, count: int
) -> None:
    fresh, primed = weights(dtype)[:count], weights(dtype)[:count]
    want = trained(make(fresh), fresh)
    got = trained(prime_optimizer(make(primed)), primed)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_state_that_is_no_longer_the_parameter_is_refused() -> None:
    """A weight decay by another name gets into the state even without a gradient."""
    params = weights(torch.float32)
    optimizer = MasterWeights(params, decay_name="shrink")
    with pytest.raises(
        PrimeError, match=r"MasterWeights's state\['master'\] of a parameter of shape \(3, 3\)"
    ):
        prime_optimizer(optimizer)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(params, weights(torch.float32), strict=True))


class Copies(TorchDispatchMode):
    """Notes whose elements are copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch ships it untyped
        self.addresses: set[int] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.addresses.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon, MasterWeights])
def test_none_of_torchs_own_optimizers_needs_a_copy_of_the_model(kind: Callable[..., Optimizer]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 2))
    with Copies() as copies:
        prime_optimizer(kind([parameter]))
    assert (parameter.data_ptr() in copies.addresses) == (kind is MasterWeights)
