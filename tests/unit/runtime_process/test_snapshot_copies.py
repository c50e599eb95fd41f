"""CPU tensors in a snapshot: each as it was, however many there are, whatever they lie like."""

import os

import pytest
import torch

from stepkeeper.save.snapshot import Region, SnapshotTaker
from stepkeeper_planners.geometry.layout import Ranks

ONE = Ranks(rank=0, world_size=1)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Make tensors of all kinds that a copy could mistake for another."""
    return {
        "parameter": torch.nn.Parameter(torch.rand(3, 4)),
        "with a gradient's history": torch.nn.Parameter(torch.rand(3)) * 2,
        "turned": torch.rand(5, 7).t(),
        "every second": torch.rand(10)[::2],
        "spread": torch.rand(1, 4).expand(3, 4),
        "conjugate": torch.rand(4, dtype=torch.complex64).conj(),
        "negative": torch.rand(4, dtype=torch.complex64).conj().imag,
        "without elements": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "large": torch.rand(300, 300),
        "large, turned": torch.rand(300, 200).t(),
        "of two bytes": torch.rand(9).to(torch.bfloat16),
    }


@pytest.mark.parametrize("n_small", [0, 3000])
def test_a_snapshot_has_all_elements_and_none_of_later_ones(
    n_small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(64))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    snapshots, region = SnapshotTaker(ONE), Region()
    small = {f"small {index}": torch.full((1 + index % 5,), float(index)) for index in range(n_small)}
    for _ in range(3):
        tensors = {**odd_tensors(), **small}
        expected = {
            name: tensor.detach().resolve_conj().resolve_neg().clone() for name, tensor in tensors.items()
        }
        snapshot = snapshots.take_snapshot(tensors, region)
        for tensor in tensors.values():
            tensor.data = torch.zeros_like(tensor)
        places = region.view_orders(snapshot.tensors)
        assert [order.fqn for order in snapshot.tensors] == sorted(tensors)
        for order, place in zip(snapshot.tensors, places, strict=True):
            assert torch.equal(place, expected[order.fqn]), order.fqn
            assert not place.requires_grad
        small = {name: tensor + 1 for name, tensor in small.items()}
    region.close()


def test_a_tensor_put_in_another_ones_place_is_the_one_that_is_copied() -> None:
    snapshots, region = SnapshotTaker(ONE), Region()
    model = torch.nn.Linear(4, 4)
    for number in range(4):
        model.weight = torch.nn.Parameter(torch.full((4, 4), float(number)))
        snapshot = snapshots.take_snapshot({"model": model}, region)
        places = dict(
            zip([order.fqn for order in snapshot.tensors], region.view_orders(snapshot.tensors), strict=True)
        )
        assert torch.equal(places["model.weight"], torch.full((4, 4), float(number)))
        assert torch.equal(places["model.bias"], model.bias)
    region.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_copies_its_parts_of_what_all_ranks_have(rank: int) -> None:
    snapshots, region = SnapshotTaker(Ranks(rank=rank, world_size=2)), Region()
    for number in range(2):
        whole = torch.rand(64, 1024) + number
        state = {"cut": whole, **{f"whole {index}": torch.rand(100) for index in range(8)}}
        snapshot = snapshots.take_snapshot(state, region)
        assert any(order.sizes != order.global_shape for order in snapshot.tensors)
        for order, place in zip(snapshot.tensors, region.view_orders(snapshot.tensors), strict=True):
            bounds = zip(order.offsets, order.sizes, strict=True)
            mine = state[order.fqn][tuple(slice(start, start + size) for start, size in bounds)]
            assert torch.equal(place, mine)
    region.close()


def test_no_memory_is_taken_that_was_not_asked_for() -> None:
    """The region has room beyond what is needed, which is to stay without pages."""
    region = Region()
    wanted_bytes = 33 * 1024 * 1024
    region.reserve(wanted_bytes)
    region.populate(wanted_bytes)
    assert os.fstat(region.fd).st_blocks * 512 <= wanted_bytes
    region.close()
