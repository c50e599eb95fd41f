"""The random number generators of a process as a part of its state."""

# ruff: noqa: NPY002  # the global generators are what is tested

import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepkeeper_planners.adapters import random_numbers
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.random_state import RandomState
from stepkeeper_planners.state.tree import flatten_state
from stepkeeper_planners.state.values import decode_value, encode_value


@pytest.fixture(autouse=True)
def _the_tests_generators_stay() -> Iterator[None]:
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(legacy)


def draw() -> list[float]:
    """Draw from each generator, in every way that leaves something behind (Gaussians come in pairs)."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def stored(state: dict[str, Any]) -> Any:
    """What a save stores, read back."""
    (value,) = flatten_state(state).per_rank.values()
    return decode_value("random", encode_value("random", value))


def load(state: dict[str, Any], value: object) -> None:
    finish_load(state, flatten_state(state), {"random.generators": value})


def test_the_same_numbers_come_again_also_from_another_object() -> None:
    seed_all(1)
    draw()
    saved = stored({"random": RandomState()})
    expected = [draw() for _ in range(3)]
    seed_all(2)
    assert draw() != expected[0]
    load({"random": RandomState()}, saved)
    assert [draw() for _ in range(3)] == expected


class Greedy:
    """An object that draws random numbers while it loads."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        draw()


def test_objects_that_draw_while_they_load_come_before_it() -> None:
    saved = stored({"random": RandomState()})
    expected = draw()
    state = {"random": RandomState(), "greedy": Greedy(), "list": [Greedy()]}
    finish_load(state, flatten_state(state), {"random.generators": saved, "greedy.a": 1, "list.0.a": 1})
    assert draw() == expected


def generators(seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(0)
    return stored({"random": RandomState()})


def resized(saved: list[Any], rank: int, world_size: int) -> list[float]:
    (resize,) = flatten_state({"random": RandomState()}).resizers.values()
    assert resize is not None
    value = resize(saved, Ranks(rank=rank, world_size=world_size))
    load({"random": RandomState()}, value)
    return draw()


def test_on_another_number_of_ranks_each_has_numbers_of_its_own_and_what_was_common_stays_so() -> None:
    saved = [generators(1), generators(2)]
    own = [resized(saved[:1], 0, 1), resized(saved[1:], 0, 1)]
    more = [resized(saved, rank, 5) for rank in range(5)]
    assert more[:2] == own, "ranks that saved go on with theirs"
    assert len({numbers[0] for numbers in more}) == len({numbers[2] for numbers in more}) == 5
    assert len({numbers[4] for numbers in more}) == 1, "torch had the same seed on all ranks"
    assert more == [resized(saved, rank, 5) for rank in range(5)], "a second start gives the same"
    assert [resized(saved, 0, 1)] == own[:1]


class Accelerator:
    """A module such as torch.cuda, with generators that are numbers."""

    def __init__(self, n_devices: int, current: int = 0) -> None:
        self.states = [torch.tensor([n]) for n in range(n_devices)]
        self.current = current

    def is_initialized(self) -> bool:
        return True

    def get_rng_state(self) -> torch.Tensor:
        return self.states[self.current]

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.states)

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = list(states)

    def manual_seed_all(self, seed: int) -> None:
        self.states = [torch.tensor([seed])] * len(self.states)


class Guarded:
    """A module such as torch_tpu's torch.tpu: it refuses what torch.accelerator has, and knows one device only."""

    def __init__(self, state: int) -> None:
        self.states = [torch.tensor([0]), torch.tensor([state])]
        self.current = 1

    def is_initialized(self) -> bool:
        return True

    def get_rng_state(self) -> torch.Tensor:
        raise RuntimeError("prefer torch.accelerator.random.get_rng_state")

    is_available = current_device = device_count = get_rng_state

    @property
    def default_generators(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(get_state=lambda state=state: state) for state in self.states]

    def set_rng_state(self, state: torch.Tensor, device: str = "tpu") -> None:
        assert device == "tpu"
        self.states[self.current] = state

    def manual_seed_all(self, seed: int) -> None:
        self.states[self.current] = torch.tensor([seed])


def use(monkeypatch: pytest.MonkeyPatch, module: Accelerator | Guarded | None, kind: str = "cuda") -> None:
    device = None if module is None else SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    if module is not None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: module.current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(module.states))
        asked = SimpleNamespace(get_rng_state=lambda: module.states[module.current])
        monkeypatch.setattr(torch.accelerator, "random", asked, raising=False)


@pytest.mark.parametrize("has_random", [True, False])
def test_a_module_that_leaves_to_torch_accelerator_what_that_has(
    monkeypatch: pytest.MonkeyPatch, has_random: bool
) -> None:
    use(monkeypatch, Guarded(7), "tpu")
    if not has_random:
        monkeypatch.delattr(torch.accelerator, "random")
    saved = stored({"random": RandomState()})
    other = Guarded(9)
    use(monkeypatch, other, "tpu")
    load({"random": RandomState()}, saved)
    assert [int(state) for state in other.states] == [0, 7]
    random_numbers.seed_accelerator(5)
    assert [int(state) for state in other.states] == [0, 5]


@pytest.mark.parametrize(
    ("n_saved", "n_now", "current", "expected"),
    [
        pytest.param(3, 3, 1, [0, 1, 2], id="as many devices: each gets its own back"),
        pytest.param(4, 1, 2, [2], id="fewer: the current one goes on with the current one's"),
    ],
)
def test_devices_get_theirs_back(
    n_saved: int, n_now: int, current: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Accelerator(n_saved, current=current))
    saved = stored({"random": RandomState()})
    other = Accelerator(n_now, current=current % n_now)
    other.states = [torch.tensor([9])] * n_now
    use(monkeypatch, other)
    load({"random": RandomState()}, saved)
    assert torch.cat(other.states).tolist() == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_what_this_process_has_no_devices_for_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    use(monkeypatch, Accelerator(1))
    saved = stored({"random": RandomState()})
    expected = draw()
    use(monkeypatch, None if kind == "cuda" else Accelerator(1), kind)
    with caplog.at_level(logging.WARNING):
        load({"random": RandomState()}, saved)
    assert "the random number generators of accelerator were not restored" in caplog.text
    assert draw() == expected


def test_an_accelerator_that_nobody_has_used_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = Accelerator(1)
    monkeypatch.setattr(unused, "is_initialized", lambda: False)
    use(monkeypatch, unused)
    assert random_numbers.read_accelerator() is None
    assert "accelerator" not in stored({"random": RandomState()})
