"""Large objects go past the page cache where that can be, and are the same bytes where it can't."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.storage.posix import PosixStore

MIB = 1024 * 1024
CONTENT = os.urandom(4 * MIB + 12_345)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "root")


def parts() -> list[bytes | memoryview]:
    """None begins or ends where a block does."""
    view, middle = memoryview(CONTENT), 2 * MIB + 5
    words = view[300_001:middle].cast("I")
    return [view[:1], b"", view[1:300_001], words, view[middle:]]


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


class Calls:
    """Record how many bytes each call wrote, past the cache and through it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, most: Callable[[int], int] = lambda asked: asked
    ) -> None:
        """Write at most `most` of the bytes that a direct write is asked for."""
        self.direct: list[int] = []
        self.cached: list[int] = []
        self._most = most
        self._writev = os.writev
        monkeypatch.setattr(os, "writev", self)

    def __call__(self, descriptor: int, buffers: list[memoryview]) -> int:
        if not is_direct(descriptor):
            self.cached.append(self._writev(descriptor, buffers))
            return self.cached[-1]
        (data,) = buffers
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        assert address % 4096 == data.nbytes % 4096 == os.lseek(descriptor, 0, os.SEEK_CUR) % 4096 == 0
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        most = self._most(data.nbytes)
        # The kernel takes nothing but blocks; it is a full disk that takes less of them.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct.append(self._writev(descriptor, [data[:most]]))
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return self.direct[-1]


def needs_direct_writes(folder: Path) -> None:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no direct writes")


def test_a_large_object_goes_past_the_cache_but_for_its_end(
    store: PosixStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_direct_writes(tmp_path)
    store.write("unwatched", parts())
    calls = Calls(monkeypatch)
    store.write("watched", parts())
    assert sum(calls.direct) == len(CONTENT) // 4096 * 4096
    assert calls.cached == [len(CONTENT) % 4096]
    store.write("in-blocks", [CONTENT[: 4 * MIB]])
    assert len(calls.cached) == 1
    assert store.read("unwatched") == store.read("watched") == CONTENT
    assert store.read("in-blocks") == CONTENT[: 4 * MIB]


def test_a_file_system_without_direct_writes(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    call = fcntl.fcntl

    def refusing(descriptor: int, command: int, flags: int = 0) -> Any:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return call(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    calls = Calls(monkeypatch)
    store.write("x", parts())
    assert not calls.direct
    assert sum(calls.cached) == len(CONTENT)
    assert store.read("x") == CONTENT


@pytest.mark.parametrize("n_taken", [0, 2])
def test_a_file_system_that_refuses_them_when_they_come(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, n_taken: int
) -> None:
    calls: list[int] = []

    def refuse(asked: int) -> int:
        calls.append(asked)
        if len(calls) > n_taken:
            raise OSError(errno.EINVAL, "not so")
        return asked

    Calls(monkeypatch, refuse)
    store.write("x", parts())
    assert len(calls) <= n_taken + 1
    assert store.read("x") == CONTENT
