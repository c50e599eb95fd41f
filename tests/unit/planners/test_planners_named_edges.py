"""Optimizers whose state isn't like torch's own: joint state, empty groups, no module, positions, no names."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.one_process import Net, p, read, refusal, same, write
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from typing_extensions import override

from stepkeeper_planners import SPMDLoadPlanner, prime_optimizer
from stepkeeper_planners.loading.differences import (
    Differences,
    Findings,
    intersect_unexpected,
    judge_differences,
)
from stepkeeper_planners.state.named_optimizer import find_named_states


def groups(net: Net, *of: str, **options: Any) -> list[dict[str, Any]]:
    return [{"params": p(net, names), **options} for names in of]


def step(net: nn.Module, optimizer: Optimizer) -> Optimizer:
    for number, parameter in enumerate(net.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return optimizer


def check_same(other: Net, back: Optimizer, net: Net, optimizer: Optimizer, names: str = "abc") -> None:
    for one, wanted in zip(p(other, names), p(net, names), strict=True):
        same(dict(back.state[one]), dict(optimizer.state[wanted]))
        assert back.state[one]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


class WithKey(AdamW):
    """Has a key of its own among its parameters' state."""

    key: Any = None

    @override
    def step(self, closure: Any = None) -> Any:
        super().step()
        self.state["all"] = {"kept": self.key}  # type: ignore[index] # custom optimizers do that


class Joint(WithKey):
    @override
    def step(self, closure: Any = None) -> Any:
        self.key = torch.cat([each.reshape(-1) for group in self.param_groups for each in group["params"]])
        super().step()


class Beside(AdamW):
    more: Any = 3

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": self.more}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.more = state_dict.pop("more")
        super().load_state_dict(state_dict)


class BesideList(Beside):
    more = (torch.ones(3),)


@pytest.mark.parametrize(
    ("kind", "is_joint"), [(WithKey, False), (Joint, True), (Beside, False), (BesideList, True)]
)
def test_state_of_all_parameters_together_is_loaded_in_one_order_only(
    kind: type[AdamW], is_joint: bool, tmp_path: Path
) -> None:
    net, other = Net(), Net()
    optimizer, back = step(net, kind(p(net, "abc"))), step(other, kind(p(other, "cba")))
    write(tmp_path / "names", model=net, optimizer=optimizer)
    state: dict[str, Any] = {"model": other, "optimizer": back}
    if is_joint:
        assert "share state in their order" in refusal(tmp_path / "names", **state)
    else:
        read(tmp_path / "names", **state)
        check_same(other, back, net, optimizer)
    # The further key has one name in checkpoints with names and with positions.
    write(tmp_path / "positions", model=net, optimizer=optimizer.state_dict())
    again = step(other, kind(p(other, "abc")))
    read(tmp_path / "positions", model=other, optimizer=again)
    check_same(other, again, net, optimizer)


class Wrapper:
    def __init__(self, net: Net) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)


HOLDERS: dict[str, Callable[[Net], Any]] = {
    "state_dict": lambda net: net.state_dict(),
    "wrapper": Wrapper,
    "nested": lambda net: {name: {"weight": getattr(net, name).weight} for name in "abc"},
    "list": lambda net: [net.a.weight, net.b.weight, net.c.weight],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_parameters_are_found_among_the_plain_tensors_of_the_state(
    hold: Callable[[Net], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, other = Net(), Net()
    optimizer, back = step(net, AdamW(p(net, "abc"))), prime_optimizer(AdamW(p(other, "cba")))
    write(tmp_path, model=hold(net), optimizer=optimizer)
    read(tmp_path, model=hold(other), optimizer=back)
    check_same(other, back, net, optimizer)
    assert not warnings_in(caplog)
    if hold is HOLDERS["state_dict"]:
        again = prime_optimizer(AdamW(p(other, "bca")))
        read(tmp_path, model=other, optimizer=again)
        check_same(other, again, net, optimizer)


def test_one_warning_for_parameters_that_are_nowhere_in_the_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, other = Net(), Net()
    optimizer, back = step(net, AdamW(p(net, "abc"))), prime_optimizer(AdamW(p(other, "abc")))
    write(tmp_path, optimizer=optimizer)
    read(tmp_path, optimizer=back)
    check_same(other, back, net, optimizer)
    (line,) = warnings_in(caplog)
    assert line.startswith("s.optimizer: 3 of its parameters are in no module of the state")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_group_without_parameters_keeps_its_options(by_name: bool, tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer = step(net, AdamW(groups(net, "abc", "", lr=0.5, initial_lr=0.25)))
    write(tmp_path, model=net, optimizer=optimizer if by_name else optimizer.state_dict())
    back = prime_optimizer(AdamW(groups(other, "abc", "")))
    read(tmp_path, model=other, optimizer=back)
    assert [(group["lr"], group["initial_lr"]) for group in back.param_groups] == [(0.5, 0.25)] * 2
    if by_name:
        swapped = prime_optimizer(AdamW(groups(other, "", "abc")))
        text = refusal(tmp_path, model=other, optimizer=swapped)
        assert "s.optimizer.param_groups.0: it has no parameters, and the checkpoint has no group" in text


def test_positions_are_selected_by_the_names_of_the_state(tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer, back = step(net, AdamW(net.parameters())), prime_optimizer(AdamW(other.parameters()))
    optimizer.state[net.a.weight]["more"] = torch.ones(2)
    write(tmp_path, model=net, optimizer=optimizer.state_dict())
    state = {"model": other, "optimizer": back}
    read(tmp_path, SPMDLoadPlanner(exclude=["s.optimizer.state.a.weight"]), **state)
    check_same(other, back, net, optimizer, "bc")
    assert not back.state[other.a.weight]["step"]
    del optimizer.state[net.a.weight]["more"]
    back.state[other.a.weight]["exp_avg"] = torch.zeros(3, 2)
    text = refusal(tmp_path, SPMDLoadPlanner(exclude=["s.optimizer.state.a.weight.more"]), **state)
    assert "exclude=('s.optimizer.state.a.weight.exp_avg',)" in text
    back.state[other.a.weight]["exp_avg"] = torch.zeros(3, 3)
    items = ["s.optimizer.state.a.weight"]
    read(tmp_path, SPMDLoadPlanner(items=items, exclude=["s.optimizer.state.a.weight.more"]), **state)
    check_same(other, back, net, optimizer)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_groups_of_other_sizes_are_refused_where_there_are_no_names(tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer = step(net, AdamW(groups(net, "aab", "c")))
    write(tmp_path, model=net, optimizers=[optimizer])
    back = prime_optimizer(AdamW(groups(other, "aa", "bc")))
    text = refusal(tmp_path, model=other, optimizers=[back])
    assert "s.optimizers.0: group 0 has 3 parameters in the checkpoint, 2 in the state" in text
    again = prime_optimizer(AdamW(groups(other, "aab", "c")))
    read(tmp_path, model=other, optimizers=[again])
    check_same(other, again, net, optimizer)


def test_a_state_with_numbers_where_the_checkpoint_has_names_is_explained(tmp_path: Path) -> None:
    net, other = Net(), Net()
    write(tmp_path, model=net, optimizer=step(net, AdamW(net.parameters())))
    back = prime_optimizer(AdamW(other.parameters()))
    text = refusal(tmp_path, model=other, optimizer=back.state_dict())
    assert "put the Optimizer object itself into the state" in text
    assert "One rename" not in text


def test_options_that_another_optimizer_gets_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, other = Net(), Net()
    write(tmp_path, model=net, optimizer=step(net, SGD(net.parameters(), lr=0.5, momentum=0.5)))
    back = prime_optimizer(AdamW(other.parameters()))
    read(tmp_path, SPMDLoadPlanner(strict=False), model=other, optimizer=back)
    assert back.param_groups[0]["momentum"] == 0.5
    assert "s.optimizer.param_groups.0.momentum (the state's group had no such entry" in caplog.text


def test_what_a_load_passes_over_is_logged_for_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Two stages: each has its own names, and `old` is of neither."""
    stored = ["one", "old", "two"]
    found = [
        Findings.from_differences(each, stored, short=True)
        for each in (
            Differences(unexpected=("old", "two"), strict=False),
            Differences(unexpected=("old", "one"), missing=("new",), left_over={"g": "why"}, strict=False),
        )
    ]
    assert judge_differences(intersect_unexpected(found, stored)) is None
    assert caplog.messages == [
        "strict=False: 1 not in the checkpoint, left as they were: new (on rank 1)",
        "strict=False: 1 not in the state, not restored: old",
        "strict=False: 1 differences of groups: g (why) (on rank 1)",
    ]
    error = judge_differences([Differences(mismatched={"w": "shape"}, missing=("new",), strict=False), None])
    assert error is not None
    assert not error.missing


def test_long_lists_are_not_searched_for_optimizers_item_by_item() -> None:
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(count)
    try:
        found = list(find_named_states({"order": list(range(1000))}))
    finally:
        sys.setprofile(None)
    assert not found
    assert calls < 100
