"""The state of an optimizer is named by its parameters: it comes back to them in any order, or is refused by name."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.one_process import Net, p, read, refusal, same, write
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from stepkeeper_planners import SPMDLoadPlanner, prime_optimizer
from stepkeeper_planners.formats import checkpoint_to_safetensors, checkpoint_to_torch_save

Make = Callable[[Net], Optimizer]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def named(net: Net, names: str) -> Any:
    return [(f"{name}.weight", getattr(net, name).weight) for name in names]


def groups(net: Net, *of: tuple[str, float], tensors: bool = False) -> list[dict[str, Any]]:
    return [{"params": p(net, n), "lr": torch.tensor(lr) if tensors else lr} for n, lr in of]


def steps(net: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Take two steps with gradients that differ from parameter to parameter."""
    for step in (1, 2):
        for number, parameter in enumerate(net.parameters()):
            parameter.grad = torch.full_like(parameter, step + 0.125 * number)
        optimizer.step(lambda: 1.0)
    return optimizer


def everything(net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All that the optimizer has for each parameter, by the parameter's name."""
    found: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        for group in optimizer.param_groups:
            if any(parameter is each for each in group["params"]):
                options = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
                found[name] = [options, dict(optimizer.state.get(parameter, {}))]
    return found


NUMBERS = "numbers as their names on the other"
ABCD: Make = lambda net: AdamW(net.parameters(), lr=0.5)
TWO: Make = lambda net: AdamW(groups(net, ("ab", 0.5), ("cd", 0.25)))
RATES: Make = lambda net: AdamW(groups(net, ("ab", 0.5), ("cd", 0.25), tensors=True))


ORDERS: dict[str, tuple[Make, Make]] = {
    "reversed": (ABCD, lambda net: AdamW(p(net, "dcba"))),
    "split": (ABCD, lambda net: AdamW(groups(net, ("cb", 0.0), ("ad", 0.0)))),
    "groups swapped": (TWO, lambda net: AdamW(groups(net, ("dc", 0.0), ("ba", 0.0)))),
    "more groups": (TWO, lambda net: AdamW(groups(net, ("a", 0.0), ("b", 0.0), ("cd", 0.0)))),
    "merged": (lambda net: AdamW(groups(net, ("a", 0.5), ("bcd", 0.5))), lambda net: AdamW(p(net, "dcba"))),
    "rates are tensors": (RATES, lambda net: AdamW(groups(net, ("dc", 0.0), ("ba", 0.0), tensors=True))),
    "names given": (lambda net: AdamW(named(net, "abcd"), lr=0.5), lambda net: AdamW(named(net, "dcba"))),
    "no state": (
        lambda net: SGD(groups(net, ("ab", 0.5), ("cd", 0.25))),
        lambda net: SGD(groups(net, ("d", 0.0), ("c", 0.0), ("ab", 0.0))),
    ),
}


@pytest.mark.parametrize(("saved", "loaded"), ORDERS.values(), ids=ORDERS)
def test_each_parameter_gets_its_own_in_any_order(saved: Make, loaded: Make, tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer = steps(net, saved(net))
    write(tmp_path, model=net, optimizer=optimizer)
    back = prime_optimizer(loaded(other))
    before = list(back.param_groups[0]["params"]), back.param_groups[0].get("param_names")
    read(tmp_path, model=other, optimizer=back)
    same(everything(other, back), everything(net, optimizer))
    assert all(one is other for one, other in zip(back.param_groups[0]["params"], before[0], strict=True))
    assert back.param_groups[0].get("param_names") == before[1]


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, nn.DataParallel, lambda net: torch.compile(nn.DataParallel(net))],
    ids=["compile", "module", "both"],
)
def test_wrappers_leave_no_trace_in_the_names(wrap: Any, tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer, back = steps(net, ABCD(net)), prime_optimizer(AdamW(p(other, "dcba")))
    write(tmp_path / "wrapped", model=wrap(net), optimizer=optimizer)
    write(tmp_path / "bare", model=net, optimizer=optimizer)
    read(tmp_path / "wrapped", SPMDLoadPlanner(exclude=["s.model"]), model=other, optimizer=back)
    same(everything(other, back), everything(net, optimizer))
    read(tmp_path / "bare", SPMDLoadPlanner(exclude=["s.model"]), model=wrap(other), optimizer=back)


def with_options(optimizer: Optimizer, **options: list[Any]) -> Optimizer:
    for name, by_group in options.items():
        for group, value in zip(optimizer.param_groups, by_group, strict=True):
            group[name] = value
    return optimizer


def one_rate(net: Net) -> Optimizer:
    rate = torch.tensor(0.0)
    return AdamW([{"params": p(net, "ab"), "lr": rate}, {"params": p(net, "cd"), "lr": rate}])


def frozen(net: Net, make: Make) -> Optimizer:
    net.a.weight.requires_grad_(False)
    return make(net)


MISFITS: dict[str, tuple[Make, Make, str]] = {
    "other": (
        lambda net: AdamW(p(net, "a")),
        lambda net: AdamW(p(net, "b")),
        "s.optimizer.state.b.weight.exp_avg",
    ),
    "frozen, then primed": (ABCD, lambda net: frozen(net, ABCD), "prime first, then freeze"),
    "left out": (ABCD, lambda net: AdamW(p(net, "bcd")), "s.optimizer.state.a.weight.exp_avg"),
    "unfrozen": (lambda net: AdamW(p(net, "bcd")), ABCD, "s.optimizer.state.a.weight.exp_avg"),
    "merged": (TWO, ABCD, "several groups, with different values: 0.5, 0.25"),
    "merged rates": (RATES, ABCD, "with different values: tensor(0.5000), tensor(0.2500)"),
    "another kind": (
        lambda net: AdamW(p(net, "abcd"), lr=torch.tensor(0.5)),
        ABCD,
        "a tensor of torch.float32 with shape () in the checkpoint, a plain value in the state",
    ),
    "a shared rate": (RATES, one_rate, "one tensor in the state with s.optimizer.param_groups.0.lr"),
    "tensors that look alike": (
        lambda net: with_options(TWO(net), near=[(torch.tensor(1.0),), (torch.tensor(1.0 + 1e-7),)]),
        ABCD,
        "several groups, with different values: (tensor(1.),)",
    ),
    "added tensors that differ": (
        lambda net: with_options(
            RATES(net), lr=[torch.tensor(0.5)] * 2, new=[torch.tensor(1), torch.tensor(2)]
        ),
        lambda net: AdamW(p(net, "abcd"), lr=torch.tensor(0.5)),
        "s.optimizer.param_groups.0.new",
    ),
    "one state for all": (
        lambda net: LBFGS(p(net, "abc")),
        lambda net: LBFGS(p(net, "acb")),
        "share state in their order",
    ),
    "other, and no state": (
        lambda net: SGD(p(net, "a")),
        lambda net: SGD(p(net, "b")),
        "no group with b.weight; the state has no group with a.weight",
    ),
    "an option that wasn't saved": (
        ABCD,
        lambda net: AdamW([{"params": net.parameters(), "initial_lr": 0.5}]),
        "s.optimizer.param_groups.0.initial_lr",
    ),
}


@pytest.mark.parametrize(("saved", "loaded", "expected"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_refused_by_name(
    saved: Make, loaded: Make, expected: str, tmp_path: Path
) -> None:
    net, other = Net(), Net()
    write(tmp_path, model=net, optimizer=steps(net, saved(net)))
    back = loaded(other)
    if isinstance(back, LBFGS):
        steps(other, back)
    else:
        prime_optimizer(back)
    assert expected in refusal(tmp_path, model=other, optimizer=back)


@pytest.mark.parametrize(
    ("saved", "loaded", "kept", "listed"),
    [
        pytest.param("abcd", "bcd", "", ["3 not in the state, not restored", "the state has no group"], id="fewer"),
        pytest.param("bcd", "abcd", "a", ["3 not in the checkpoint, left", "the checkpoint has no group"], id="more"),
    ],
)  # fmt: skip
def test_a_load_that_is_not_strict_fills_what_both_have_and_lists_the_rest(
    saved: str, loaded: str, kept: str, listed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, other = Net(), Net()
    optimizer = steps(net, AdamW(p(net, saved), lr=0.5))
    write(tmp_path, model=net, optimizer=optimizer)
    back = prime_optimizer(AdamW(p(other, loaded)))
    untouched = everything(other, back)
    read(tmp_path, SPMDLoadPlanner(strict=False), model=other, optimizer=back)
    wanted, found = everything(net, optimizer), everything(other, back)
    both = found.keys() & wanted.keys()
    same({n: found[n] for n in both}, {n: wanted[n] for n in both})
    for name in kept:
        same(found[f"{name}.weight"][1], untouched[f"{name}.weight"][1])
    assert all(part in caplog.text for part in (*listed, "s.optimizer.state.a.weight.exp_avg"))


def test_options_that_a_step_adds_come_with_the_group(tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer, back = steps(net, TWO(net)), prime_optimizer(AdamW(groups(other, ("dc", 0.0), ("ba", 0.0))))
    for number, group in enumerate(optimizer.param_groups):
        group["step"] = number + 7
    write(tmp_path, model=net, optimizer=optimizer)
    read(tmp_path, model=other, optimizer=back)
    assert [group["step"] for group in back.param_groups] == [8, 7]
    assert [group["lr"] for group in back.param_groups] == [0.25, 0.5]


def test_parts_of_an_optimizer_are_selected_by_the_names_of_the_state(tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer, back = steps(net, TWO(net)), prime_optimizer(AdamW(groups(other, ("dc", 0.0), ("ba", 0.0))))
    write(tmp_path, model=net, optimizer=optimizer)
    exclude = ["s.optimizer.param_groups.0", "s.optimizer.state.a.weight"]
    read(tmp_path, SPMDLoadPlanner(exclude=exclude), model=other, optimizer=back)
    assert [group["lr"] for group in back.param_groups] == [0.0, 0.5]
    assert not back.state[other.a.weight]["step"]
    assert back.state[other.b.weight]["step"] == 2
    read(tmp_path, SPMDLoadPlanner(items=["s.model"]), model=other, optimizer=back)
    read(tmp_path, SPMDLoadPlanner(items=["s.optimizer.state"]), model=other, optimizer=back)
    assert [group["lr"] for group in back.param_groups] == [0.0, 0.5]
    same(everything(other, back)["a.weight"][1], everything(net, optimizer)["a.weight"][1])


@pytest.mark.parametrize("strict", [True, False])
def test_positions_are_restored_by_position_and_shape(
    strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, other = Net(), Net()
    optimizer = steps(net, TWO(net))
    write(tmp_path, model=net, optimizer=optimizer.state_dict())
    back = prime_optimizer(AdamW(groups(other, ("ab", 0.0), ("cd", 0.0))))
    read(tmp_path, SPMDLoadPlanner(strict=strict), model=other, optimizer=back)
    same(everything(other, back), everything(net, optimizer))
    (line,) = [each for each in caplog.messages if "by position, not by name" in each]
    assert line.startswith("s.optimizer:")
    for wrong in (AdamW(p(other, "dabc")), AdamW(groups(other, ("abc", 0.0), ("d", 0.0)))):
        refusal(tmp_path, SPMDLoadPlanner(strict=strict), model=other, optimizer=prime_optimizer(wrong))
    # Names aren't taken for positions, nor positions for names.
    write(tmp_path / "named", model=net, optimizer=optimizer)
    refusal(tmp_path / "named", model=other, optimizer=back.state_dict())
    odd = optimizer.state_dict()
    for group, numbers in zip(odd["param_groups"], ([0, 2], [1, 3]), strict=True):
        group["params"] = numbers
    write(tmp_path / "odd", model=net, optimizer=odd)
    assert "numbers aren't positions" in refusal(tmp_path / "odd", model=other, optimizer=back)
    numbered, again = nn.ParameterList(net.parameters()), nn.ParameterList(other.parameters())
    assert NUMBERS in refusal(tmp_path, SPMDLoadPlanner(exclude=["s.model"]), model=again, optimizer=back)
    write(tmp_path / "numbers", model=numbered, optimizer=optimizer)
    only = SPMDLoadPlanner(items=["s.optimizer.state"])
    assert NUMBERS in refusal(tmp_path / "numbers", only, model=other, optimizer=back)
    swapped = prime_optimizer(AdamW(groups(other, ("dc", 0.0), ("ba", 0.0))))
    read(tmp_path / "numbers", model=again, optimizer=swapped)
    same(everything(other, swapped), everything(net, optimizer))


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flattened"])
@pytest.mark.parametrize("make", [TWO, RATES], ids=["numbers", "tensors"])
def test_torchs_checkpoints_are_read_and_read_ours(make: Make, options: Any, tmp_path: Path) -> None:
    net, other, third = Net(), Net(), Net()
    optimizer = steps(net, make(net))
    wanted = everything(net, optimizer)
    theirs: Any = get_optimizer_state_dict(net, optimizer, options=options)
    save(
        {"s": {"model": net.state_dict(), "optimizer": theirs}},
        checkpoint_id=tmp_path / "theirs",
        no_dist=True,
    )
    back = prime_optimizer(AdamW(groups(other, ("dc", 0.0), ("ba", 0.0), tensors=make is RATES)))
    read(tmp_path / "theirs", model=other, optimizer=back)
    same(everything(other, back), wanted)

    write(tmp_path / "ours", model=net, optimizer=optimizer)
    again = AdamW(groups(third, ("ab", 0.0), ("cd", 0.0), tensors=make is RATES))
    stocks: Any = get_optimizer_state_dict(third, again, options=options)
    for planner in (None, SPMDLoadPlanner(exclude=["s.model"])):
        state: dict[str, Any] = {"s": {"optimizer": stocks}}
        load(state, checkpoint_id=tmp_path / "ours", planner=planner, no_dist=True)
        set_optimizer_state_dict(third, again, state["s"]["optimizer"], options=options)
        same(everything(third, again), wanted)


def test_exports_have_the_names_once(tmp_path: Path) -> None:
    net = Net()
    optimizer = steps(net, RATES(net))
    write(tmp_path / "c", model=net, optimizer=optimizer)
    checkpoint_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    exported = torch.load(tmp_path / "c.pt", weights_only=True)["s"]["optimizer"]
    assert exported.keys() == {"state", "param_groups"}
    assert exported["state"].keys() == {f"{name}.weight" for name in "abcd"}
    back = RATES(net)
    back.load_state_dict(exported)
    same(everything(net, back), everything(net, optimizer))
    checkpoint_to_safetensors(tmp_path / "c", tmp_path / "st", values="leave_out")
    files = (tmp_path / "st").glob("*.safetensors")
    assert {name for path in files for name in load_file(path)} == {
        f"s.optimizer.{rest}"
        for rest in (
            "param_groups.0.lr",
            "param_groups.1.lr",
            *(f"state.{n}.weight.{k}" for n in "abcd" for k in ("step", "exp_avg", "exp_avg_sq")),
        )
    } | {f"s.model.{name}.weight" for name in "abcd"}


def test_hostile_groups_are_no_groups(tmp_path: Path) -> None:
    net = Net()
    optimizer = prime_optimizer(AdamW(p(net, "ab")))
    entries: Iterable[Any] = ([], [{"params": [[]]}], {"0": {"params": 1}, "x": {"lr": 2}}, "no list")
    for number, content in enumerate(entries):
        state: Any = get_optimizer_state_dict(net, optimizer)
        write(tmp_path / str(number), model=net, optimizer={**state, "param_groups": content})
        assert "no group with a.weight" in refusal(tmp_path / str(number), model=net, optimizer=optimizer)
