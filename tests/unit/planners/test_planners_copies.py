"""Digests of copies: equal for equal bits only, as of the moment at which they were read."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.saving import planned_state
from stepkeeper_planners.saving.copies import CopyDigests, HeldCopies, find_copies, sample_copy
from stepkeeper_planners.saving.differing_copies import group_ranks
from stepkeeper_planners.saving.planned_state import PlannedState
from stepkeeper_planners.state.tree import flatten_state

BOTH = Ranks(rank=0, world_size=2)
KINDS = [
    torch.bool,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.uint16,
    torch.float32,
    torch.int64,
    torch.complex64,
]


class CopiedBytes(TorchDispatchMode):
    """Count the bytes that this thread copies into another order."""

    n_bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.n_bytes += result.nbytes
        return result


def digest_of(*tensors: torch.Tensor) -> str:
    named = {f"t{i}": tensor for i, tensor in enumerate(tensors)}
    layouts = [
        whole_tensor(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, BOTH)
        for name, tensor in named.items()
    ]
    (digest,) = read(named, find_copies(layouts, 0, named)).combine().values()
    return digest


def read(tensors: dict[str, torch.Tensor], found: Sequence[HeldCopies]) -> CopyDigests:
    digests = CopyDigests(found)
    digests.read(tensors, lambda: None)
    return digests


def numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(n)
    return torch.randint(0, 100, (n,)).to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("n", [3, 200_001])
def test_an_element_that_differs_is_found_wherever_it_is(dtype: torch.dtype, n: int) -> None:
    one = numbers(n, dtype)
    assert digest_of(one) == digest_of(one.clone())
    for place in (0, n // 2, n - 1):
        other = one.clone()
        other[place] = 1 if not one[place] else 0
        assert digest_of(other) != digest_of(one)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
@pytest.mark.parametrize("n", [3, 200_001])
def test_pairs_of_4_bits_are_digested_and_sampled(n: int) -> None:
    one, other = torch.zeros(2, n, dtype=torch.uint8)
    other[-1] = 16
    first, second = one.view(torch.float4_e2m1fn_x2), other.view(torch.float4_e2m1fn_x2)
    assert digest_of(first) != digest_of(second)
    assert sample_copy(first) != sample_copy(second)


@pytest.mark.parametrize("n", [300, 200_000])
def test_elements_and_tensors_that_swap_are_found(n: int) -> None:
    one, other = numbers(n, torch.float32), numbers(n + 1, torch.float32)[:n]
    assert digest_of(one, other) != digest_of(other, one)
    for stretch in (1, 7, n // 3):
        assert digest_of(one.roll(stretch)) != digest_of(one)


def test_payloads_of_nans_count_and_nans_are_equal_to_themselves() -> None:
    nan, other = (
        torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)
    )
    assert digest_of(nan) == digest_of(nan.clone()) != digest_of(other)


@pytest.mark.parametrize("n", [2, 300_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_signs_that_differ_are_found(n: int, dtype: torch.dtype) -> None:
    one = torch.randn(n, dtype=dtype)
    other = one.conj() if one.is_complex() else -one
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("every", [2, 4, 8])
def test_zeros_of_other_signs_are_found(dtype: torch.dtype, every: int) -> None:
    one = torch.zeros(4096, dtype=dtype)
    for first in range(every):
        other = one.clone()
        other[first :: 2048 // every] = -0.0
        assert digest_of(one) != digest_of(other)


def test_of_small_tensors_only_the_one_that_differs_is_named() -> None:
    named = {f"t{i}": torch.ones(i % 5 + 1) for i in range(1000)} | {"large": torch.ones(123_456)}
    layouts = [whole_tensor(name, "float32", tensor.shape, BOTH) for name, tensor in named.items()]
    found = find_copies(layouts, 0, named)
    before = read(named, found).list_names(found[0].key, named)
    named["t700"][0] = 2.0
    after = read(named, found).list_names(found[0].key, named)
    assert {name for name in named if before[name] != after[name]} == {"t700"}


@pytest.mark.parametrize("shape", [(7,), (300, 500)])
def test_a_digest_is_of_the_moment_at_which_it_was_read(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    found = find_copies([whole_tensor("t", "float32", shape, BOTH)], 0, {"t": tensor})
    digests = read({"t": tensor}, found)
    tensor.zero_()
    then = read({"t": torch.ones(shape)}, found)
    assert digests.combine() == then.combine()


def test_a_tensor_in_another_order_of_memory_has_the_same_digest() -> None:
    tensor = torch.arange(90_000.0).reshape(300, 300)
    assert digest_of(tensor) == digest_of(tensor.T.contiguous().T)
    whole = torch.arange(90_001.0)
    assert digest_of(whole[1:]) == digest_of(whole[1:].clone())
    for shape in [(1, 3, 500, 450), (5, 1, 2, 70_000), (700_001, 2), (2, 700_001)]:
        large = torch.arange(math.prod(shape)).reshape(shape)
        assert digest_of(large) == digest_of(large.mT.contiguous().mT), shape


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(), (6,), (4, 3), (2, 3, 2, 2)])
def test_small_tensors_have_one_digest_however_a_rank_holds_them(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    alike = [numbers(math.prod(shape), dtype).reshape(shape) for _ in range(3)]
    digest = digest_of(*alike)
    channels_last = [
        each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for each in alike
    ]
    assert digest_of(*channels_last) == digest
    alike[1].held = "otherwise"  # type: ignore[attr-defined]  # so it isn't an ordinary tensor
    assert digest_of(*alike) == digest
    alike[2].view(-1).view(torch.uint8)[-1] ^= 1
    assert digest_of(*alike) != digest


def test_of_a_tensor_in_another_order_of_memory_little_is_copied() -> None:
    tensor = torch.ones(3000, 2000).T
    found = find_copies([whole_tensor("t", "float32", tensor.shape, BOTH)], 0, {"t": tensor})
    digests = CopyDigests(found)
    with CopiedBytes() as copied:  # type: ignore[no-untyped-call]  # torch has no types for it
        digests.list_names(found[0].key, {"t": tensor})
    assert copied.n_bytes < 2 * tensor.nbytes


def test_copies_are_compared_among_the_ranks_that_hold_them() -> None:
    halves = [Box(offsets=(start,), sizes=(2,)) for start in (0, 2)]
    chunks = tuple(
        Chunk(box=box, owners=tuple(Owner(rank=rank, local_index=0) for rank in (part, part + 2)))
        for part, box in enumerate(halves)
    )
    layout = TensorLayout(fqn="w", dtype="float32", global_shape=(4,), chunks=chunks)
    keys = [[each.key for each in find_copies([layout], rank, {})] for rank in range(5)]
    assert keys[0] == keys[2] != keys[1] == keys[3]
    assert keys[4] == []
    assert group_ranks([{"0,2": "a"}, {"1,3": "b"}, {"0,2": "a"}, {"1,3": "c"}]) == {"1,3": [[1], [3]]}


def test_what_several_processes_compute_in_one_program_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = [whole_tensor(name, "float32", (3,), BOTH) for name in ("on device", "on host")]
    there: Any = SimpleNamespace(device=torch.device("xla:0"), is_cpu=False)
    tensors = {"on device": there, "on host": torch.ones(3)}
    for is_one, names in ((False, ("on device",)), (True, ())):
        monkeypatch.setattr(adapters, "is_one_program", lambda is_one=is_one: is_one)
        (found,) = find_copies(layouts, 0, tensors)
        assert found.on_devices == names
        assert [layout.fqn for layout, *_ in found.chunks] == ["on host"]


def test_planners_find_any_number_of_different_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 11
    values: list[object] = [None] * n
    met = Barrier(n)

    def all_gather_object(value: object, rank: Any) -> list[object]:
        values[rank] = value
        met.wait(60)
        found = list(values)
        met.wait(60)
        return found

    def count_writes(rank: Any) -> int:
        b = torch.ones(100_000) * (2 if rank == n - 1 else 1)
        flat = flatten_state({"a": torch.full((3,), float(rank)), "b": b})
        planned = PlannedState(flat, flat.tensors, Ranks(rank=rank, world_size=n))
        assert planned.compare_copies(None, [range(n)], rank)
        return len(planned.make_items()[1])

    monkeypatch.setattr(planned_state, "all_gather_object", all_gather_object)
    with ThreadPoolExecutor(n) as ranks:
        assert list(ranks.map(count_writes, range(n))) == [2] + [0] * (n - 1)
