"""Test plans from layouts alone: which rank writes what, and what is read."""

import numpy as np
import pytest
import torch
from planners_parts.layouts import rows

from stepkeeper_planners.adapters import describe, fill, local_shards
from stepkeeper_planners.errors import LayoutError, UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.saving.assignment import plan_save
from stepkeeper_planners.state.values import estimate_value_bytes

ALONE = Ranks(rank=0, world_size=1)


def test_large_values_are_written_by_who_has_least_to_write() -> None:
    layouts = [rows("forced", (0, 2_000_000, (0,))), rows("shared", (0, 1_000_000, (0, 1, 2)))]
    sizes = {"replay": 8_000_000, "vocabulary": 100_000, "step": 8}
    found = [plan_save(layouts, sizes, Ranks(rank=rank, world_size=3)) for rank in range(3)]
    assert [plan.values for plan in found] == [("step",), ("vocabulary",), ("replay",)]
    assert [[write.fqn for write in plan.tensors] for plan in found] == [["forced"], ["shared"], []]
    mixed = dict(reversed(sizes.items()))
    assert plan_save(layouts[::-1], mixed, Ranks(rank=1, world_size=3)) == found[1]


def test_the_size_of_a_value_is_that_of_its_content_in_any_order() -> None:
    value = {"a": torch.zeros(100), "b": [np.zeros(7), "text", b"bytes", 3], "c": (1.5, None)}
    assert estimate_value_bytes(value) == estimate_value_bytes(dict(reversed(value.items())))
    assert 400 + 56 + 9 <= estimate_value_bytes(value) <= 400 + 56 + 9 + 64


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            rows("w", (0, 4, (0,)), (2, 4, (3, 5))),
            r"^w: chunk .* \(on rank 0\) and chunk .* \(on ranks 3, 5\) overlap",
        ),
        (rows("w", (0, 4, ())), r"^w: chunk .* is held by ranks \(\) of 1"),
        (rows("w", (0, 4, (0, 1))), r"^w: chunk .* is held by ranks \(0, 1\) of 1"),
    ],
    ids=["overlap", "held by none", "held by a stranger"],
)
def test_layouts_that_lose_or_double_something_are_refused(layout: TensorLayout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        plan_save([layout], {}, ALONE)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::3],
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, dtype=torch.bfloat16),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)
def test_a_plain_tensor_is_read_and_filled(tensor: torch.Tensor) -> None:
    layout = describe("t", tensor, Ranks(rank=1, world_size=3))
    assert layout == whole_tensor(
        "t", str(tensor.dtype)[6:], tuple(tensor.shape), Ranks(rank=0, world_size=3)
    )
    shard = local_shards(tensor)[0]
    assert shard.is_contiguous()
    assert not shard.requires_grad
    assert not shard.is_conj()
    assert torch.equal(shard, tensor)
    other = tensor.detach().clone()
    fill(other, {0: torch.zeros_like(shard)})
    fill(other, {0: shard})
    assert torch.equal(other, tensor)


def test_filling_a_parameter_is_no_operation_of_the_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    fill(parameter, {0: torch.zeros(2)})
    assert parameter.is_leaf
    assert parameter.grad_fn is None
    assert torch.equal(parameter.detach(), torch.zeros(2))


@pytest.mark.parametrize("piece", [{}, {0: torch.ones(3)}, {0: torch.ones(2, dtype=torch.float64)}])
def test_a_piece_that_doesnt_fit_is_refused(piece: dict[int, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="local shard 0"):
        fill(torch.ones(2), piece)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.ones(2, device="meta"), "meta"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.bits16), "bits16.*view"),
        (
            torch.sparse_coo_tensor(
                torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (3,), check_invariants=False
            ),
            "sparse",
        ),
    ],
)
def test_tensors_without_plain_elements_are_refused(tensor: torch.Tensor, word: str) -> None:
    with pytest.raises(UnsupportedShardingError, match=f"layer.w.*{word}"):
        describe("layer.w", tensor, ALONE)
