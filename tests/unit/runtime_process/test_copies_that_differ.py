"""Copies of one tensor on several ranks: they are divided only where they are equal, else one rank's is saved."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from typing_extensions import override

from stepkeeper.coordination.rank_group import StoreRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import CopiesDifferError
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.first_comparison import FirstComparison
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot, SnapshotTaker
from stepkeeper_planners.errors import RanksDifferError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.saving.copies import CopyDigests
from stepkeeper_planners.saving.differing_copies import CopyVerdict
from stepkeeper_planners.state.tree import FlatState

State = dict[str, Any]
Saved = tuple[dict[str, torch.Tensor], CopyVerdict | None]
"""What one rank wrote by name, and the verdict before it was copied."""


def save(states: Sequence[State], *, compare: bool = True, all_first: bool = False) -> list[Saved]:
    """Take each rank's snapshot in a thread of its own, compare it as it is, and return what each wrote."""
    store, n = HashStore(), len(states)

    def take(rank: int) -> Saved:
        group, region = StoreRankGroup(store, rank, n), Region()
        verdicts: list[CopyVerdict | None] = []

        class Ask(FirstComparison):
            @override
            def __call__(
                self, digests: CopyDigests, names: Callable[[], dict[str, bytes]], flat: FlatState
            ) -> CopyVerdict | None:
                verdicts.append(super().__call__(digests, names, flat))
                return verdicts[-1]

        ask = Ask("first", 7, group, Waits(), reads_devices=False)
        taker = SnapshotTaker(Ranks(rank=rank, world_size=n), all_first=all_first)
        snapshot = taker.take_snapshot(states[rank], region, compare=ask if compare else None)
        check_same_state("save", 7, snapshot.digest, group, copies=snapshot.copy_digests)
        return parts_of(snapshot, region), (verdicts or [None])[0]

    with ThreadPoolExecutor(n) as ranks:
        return [each.result() for each in [ranks.submit(take, rank) for rank in range(n)]]


def parts_of(snapshot: Snapshot, region: Region) -> dict[str, torch.Tensor]:
    views = region.view_orders(snapshot.plan.orders)
    return {order.fqn: view.clone() for order, view in zip(snapshot.tensors, views, strict=True)}


def test_equal_copies_are_divided() -> None:
    torch.manual_seed(0)
    state = {"a": torch.randn(9, 70_001), "b": torch.randn(300, 300), "c": torch.tensor(float("nan"))}
    written = save([state] * 3)
    assert [verdict for _, verdict in written] == [None] * 3
    assert all(parts for parts, _ in written[:2])
    assert sum(part.numel() for parts, _ in written for part in parts.values()) == 9 * 70_001 + 90_001


def test_of_entries_of_dicts_the_first_ranks_copies_are_written() -> None:
    states = [{"experts": {str(i): torch.full((4,), 10.0 * i + rank) for i in range(2)}} for rank in range(3)]
    written = save(states)
    assert {name: part[0].item() for name, part in written[0][0].items()} == {"experts.0": 0, "experts.1": 10}
    assert not written[1][0]
    assert not written[2][0]
    for _, verdict in written:
        assert verdict is not None
        assert verdict.ranks == {"experts.0": [1, 2], "experts.1": [1, 2]}
        assert verdict.first == ["experts"]


def test_copies_that_differ_after_the_first_save_are_found() -> None:
    states = [{"w": torch.ones(40_000), "b": torch.ones(3)} for _ in range(2)]
    states[1]["w"][39_999] = 2.0
    with pytest.raises(CopiesDifferError, match="copies of some tensors differ"):
        save(states, compare=False)


def modules(seeds: Sequence[int], make: Callable[[], nn.Module] = lambda: nn.Linear(30, 30)) -> list[State]:
    states = []
    for seed in seeds:
        torch.manual_seed(seed)
        states.append({"model": make()})
    return states


def test_parameters_of_other_seeds_are_refused_by_name() -> None:
    with pytest.raises(RanksDifferError) as raised:
        save(modules([1, 2, 1]))
    assert raised.value.ranks == {"model.bias": (1,), "model.weight": (1,)}
    for advice in ("PerRank", "DTensor", "process group", 'Options(replicas="first")'):
        assert advice in str(raised.value)


def test_parameters_that_drifted_are_written_by_the_first_rank() -> None:
    states = modules([1, 1])
    with torch.no_grad():
        states[1]["model"].weight.mul_(1.001)
    (first, verdict), (second, _) = save(states)
    assert verdict is not None
    assert verdict.first == ["model"]
    assert torch.equal(first["model.weight"], states[0]["model"].weight)
    assert torch.equal(first["model.bias"], states[0]["model"].bias)
    assert not second


def test_buffers_are_the_first_ranks_silently() -> None:
    states = modules([1, 1], lambda: nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)))
    for rank, state in enumerate(states):
        state["model"](torch.full((3, 40), float(rank)))
    written = save(states)
    assert [verdict for _, verdict in written] == [None] * 2
    names = {f"model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert names <= written[0][0].keys()
    assert not names & written[1][0].keys()


def test_optimizer_state_by_number_is_no_entry_of_a_dict() -> None:
    states: list[State] = [
        {"opt": {"state": {0: {"exp_avg": torch.full((4,), rank)}}, "param_groups": [{"params": [0]}]}}
        for rank in (1.0, 2.0)
    ]
    with pytest.raises(RanksDifferError, match=r"opt\.state\.0\.exp_avg \(on rank 1\)"):
        save(states)


def test_integers_of_dicts_that_differ_are_refused() -> None:
    states = [{"rng": torch.tensor([rank], dtype=torch.uint8)} for rank in (3, 4)]
    with pytest.raises(RanksDifferError, match=r"rng \(on rank 1\): another value than on the other ranks"):
        save(states)


def test_with_replicas_first_nothing_is_compared() -> None:
    states = modules([1, 2])
    (first, verdict), (second, _) = save(states, all_first=True)
    assert verdict is None
    assert torch.equal(first["model.weight"], states[0]["model"].weight)
    assert not second


def test_states_of_other_shapes_are_refused_by_name() -> None:
    states = [{"model": nn.Linear(size, 1)} for size in (3, 5)]
    with pytest.raises(RanksDifferError, match=r"model\.weight \(on rank 1\)"):
        save(states)


def test_any_number_of_different_copies_is_found_before_the_snapshot() -> None:
    states = [{"a": torch.full((3,), float(rank)), "b": torch.ones(3)} for rank in range(11)]
    states[10]["b"] *= 2
    assert all(verdict is not None for _, verdict in save(states))


def test_ranks_that_do_not_all_compare_first_save_nothing() -> None:
    store = HashStore()

    def compare(rank: int) -> None:
        group = StoreRankGroup(store, rank, 2)
        if rank:
            check_same_state("save/1", 7, dict, group)
        else:
            compare = FirstComparison("save/1", 7, group, Waits(), reads_devices=True)
            compare(CopyDigests(()), dict, FlatState(tensors={}, values={}))

    with ThreadPoolExecutor(2) as ranks:
        for each in [ranks.submit(compare, rank) for rank in range(2)]:
            with pytest.raises(CopiesDifferError, match="not all ranks"):
                each.result()
