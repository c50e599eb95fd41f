"""Memory that another process can map."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from stepkeeper import fork_guard
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


def test_it_grows_and_never_shrinks() -> None:
    region = Region()
    sizes = []
    for wanted in (0, 100, 50, 8_000_000, 10_000):
        region.reserve(wanted)
        assert region.size_bytes >= wanted
        sizes.append(region.size_bytes)
    assert sizes == sorted(sizes)
    region.write_bytes(9_000, b"tail")
    assert bytes(region.view_tensor(9_000, torch.uint8, (4,)).tolist()) == b"tail"
    assert region.view_tensor(0, torch.float32, ()).shape == ()
    assert region.view_tensor(0, torch.float32, (0, 3)).numel() == 0
    region.close()


def test_no_memory_is_taken_that_was_not_asked_for() -> None:
    """The region has room beyond what is needed, which is to stay without pages."""
    region = Region()
    wanted_bytes = 33 * 1024 * 1024
    region.reserve(wanted_bytes)
    region.populate(wanted_bytes)
    assert os.fstat(region.fd).st_blocks * 512 <= wanted_bytes
    region.close()


def test_no_worker_is_forked_between_the_making_of_a_map_and_its_being_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The map has a descriptor of its own, which the worker would keep."""
    forks_are_free: list[bool] = []
    make, lock = mmap.mmap, fork_guard._guard._lock

    def try_lock() -> bool:
        if is_free := lock.acquire(blocking=False):
            lock.release()
        return is_free

    def look(*args: Any) -> mmap.mmap:
        with ThreadPoolExecutor() as other:
            forks_are_free.append(other.submit(try_lock).result())
        return make(*args)

    monkeypatch.setattr(mmap, "mmap", look)
    region = Region()
    region.reserve(100)
    region.reserve(8_000_000)
    assert forks_are_free == [False, False]
    region.close()
