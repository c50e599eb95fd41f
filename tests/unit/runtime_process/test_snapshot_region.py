"""Memory that another process can map."""

import mmap
import os

import pytest
import torch

from stepkeeper.save.snapshot import Region


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16])
def test_a_tensor_lies_where_it_was_put(dtype: torch.dtype) -> None:
    region = Region()
    region.reserve(4096)
    source = (torch.arange(12).view(3, 4) % 2).to(dtype)
    region.view_tensor(64, dtype, (3, 4)).copy_(source)
    with mmap.mmap(region.fd, 0, access=mmap.ACCESS_READ) as other:
        seen = bytearray(other[64 : 64 + 12 * dtype.itemsize])
    assert torch.equal(torch.frombuffer(seen, dtype=dtype).view(3, 4), source)
    region.close()


def test_no_memory_is_taken_that_was_not_asked_for() -> None:
    """The region has room beyond what is needed, which is to stay without pages."""
    region = Region()
    wanted_bytes = 33 * 1024 * 1024
    region.reserve(wanted_bytes)
    region.populate(wanted_bytes)
    assert os.fstat(region.fd).st_blocks * 512 <= wanted_bytes
    region.close()
