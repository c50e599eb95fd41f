"""Test which tensors ranks compare by content."""

import pytest
import torch

from stepkeeper_planners.saving.fingerprints import digest_integer_tensor


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("n_elements", [1, 20_000, 1_000_000])
def test_whole_numbers_on_the_host_are_compared_whatever_their_size(
    dtype: torch.dtype, n_elements: int
) -> None:
    one = torch.zeros(n_elements, dtype=dtype)
    other = one.clone()
    assert digest_integer_tensor(one) is not None
    assert digest_integer_tensor(one) == digest_integer_tensor(other)
    other[-1] = 1
    assert digest_integer_tensor(one) != digest_integer_tensor(other)
    as_parameter = torch.nn.Parameter(one, requires_grad=False)
    assert digest_integer_tensor(as_parameter) is not None
    assert digest_integer_tensor(torch.stack([one, other])[:, -1]) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_ranks_compute_each_for_itself_is_not_compared(dtype: torch.dtype) -> None:
    assert digest_integer_tensor(torch.zeros(3, dtype=dtype)) is None
