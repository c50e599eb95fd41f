"""An optimizer goes on with the tensors that a load has filled, of the dtypes that its steps gave them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import ASGD, SGD, AdamW, NAdam, Optimizer
from typing_extensions import override

from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.state.filling import fill_state
from stepkeeper_planners.state.tree import flatten_state


class MasterWeights(Optimizer):
    """Float32 weights beside low-precision ones, in a list with their momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                master = p.detach().float().clone()
                state["float32"] = [master, torch.zeros_like(master)]
            master, momentum = state["float32"]
            momentum.mul_(0.9).add_(p.grad.float())
            master.sub_(0.1 * momentum)
            p.copy_(master)


class Wrapper(Optimizer):
    """Wrap an optimizer as Accelerate and Lookahead do: it never calls Optimizer.__init__()."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    @override
    def param_groups(self) -> Any:  # type: ignore[override]  # an attribute of Optimizer
        return self.optimizer.param_groups

    @override
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def trained(optimizer: Optimizer, steps: int) -> Optimizer:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return optimizer


def weights() -> list[torch.nn.Parameter]:
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    return [torch.nn.Parameter(values.to(torch.bfloat16))]


def load_from(source: Optimizer, target: Optimizer) -> None:
    """Fill the target's tensors with the source's, and set its numbers, as a restore does."""
    flat, stored = flatten_state({"o": target}), flatten_state({"o": source})
    for name, tensor in flat.tensors.items():
        tensor.copy_(stored.tensors[name])
    fill_state({"o": target}, flat, stored.values)


@pytest.mark.parametrize("make", [NAdam, ASGD, AdamW, MasterWeights, lambda p: Wrapper(AdamW(p))])
def test_training_goes_on_to_the_bit(make: Callable[[Any], Optimizer]) -> None:
    first, second = weights(), weights()
    undisturbed = trained(make(first), 3)
    resumed = make(second)
    prime_optimizer(resumed.optimizer if isinstance(resumed, Wrapper) else resumed)
    with torch.no_grad():
        second[0].copy_(first[0])
    load_from(undisturbed, resumed)
    trained(undisturbed, 4)
    trained(resumed, 4)
    assert torch.equal(first[0], second[0])


def test_a_number_stays_of_its_dtype_and_the_same_tensor() -> None:
    optimizer = prime_optimizer(NAdam(weights()))
    (parameter,) = optimizer.param_groups[0]["params"]
    held = dict(optimizer.state[parameter])
    load_from(trained(NAdam(weights()), 2), optimizer)
    assert optimizer.state[parameter]["mu_product"].dtype == torch.float32
    assert all(optimizer.state[parameter][name] is tensor for name, tensor in held.items())


def test_settings_that_place_numbers_elsewhere_are_followed() -> None:
    """What was saved with other settings has its numbers where these say: torch's own load puts them there."""
    optimizer = prime_optimizer(NAdam(weights()))
    (parameter,) = optimizer.param_groups[0]["params"]
    held = optimizer.state[parameter]["mu_product"]
    source = prime_optimizer(NAdam(weights()))
    source.param_groups[0]["capturable"] = True
    load_from(source, optimizer)
    assert optimizer.param_groups[0]["capturable"]
    assert optimizer.state[parameter]["mu_product"] is not held


def test_a_hook_says_what_the_state_is_after_a_load() -> None:
    optimizer = prime_optimizer(SGD(weights(), lr=0.1, momentum=0.9))
    (parameter,) = optimizer.param_groups[0]["params"]
    mine = torch.ones(5, 3)
    optimizer.register_load_state_dict_post_hook(lambda it: it.state[parameter].update(momentum_buffer=mine))
    load_from(optimizer, optimizer)
    assert optimizer.state[parameter]["momentum_buffer"] is mine
