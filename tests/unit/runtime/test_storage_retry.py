"""Test the retries of requests, checksums, and writes past the page cache."""

import ctypes
import errno
import fcntl
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.storage import retry
from stepkeeper.storage.crc import block_crcs, combine_crc32c, crc32c, crc32c_of_parts
from stepkeeper.storage.posix import PosixStore
from stepkeeper.storage.retry import Patience

Ask = Callable[..., list[float]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """ask(answers, try_s): at which seconds a store was asked. It gives these answers, and then none any more."""
    monkeypatch.setattr(retry, "_warnings", retry._Warnings())
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    def ask(answers: Iterable[Exception | None] = (), try_s: float = 0.0) -> list[float]:
        asked, given = [], iter(answers)

        def operation() -> None:
            asked.append(now_s[0] - 1000.0)
            sleep(try_s)
            answer = next(given, TransientStorageError("503 for /root/x"))
            if answer is not None:
                raise answer

        try:
            Patience(sleep=sleep).retry(operation)
        except TransientStorageError:
            return [*asked, -1.0]
        return asked

    return ask


@pytest.mark.parametrize(
    ("try_s", "tries"), [(0.0, range(15, 40)), (30.0, range(4, 7)), (700.0, range(2, 3))]
)
def test_tries_end_in_time(ask: Ask, try_s: float, tries: range) -> None:
    *asked, end = ask(try_s=try_s)
    assert end == -1
    assert len(asked) in tries
    assert asked[-1] - asked[0] < max(90 + 60 + 8, try_s + 1)


def test_what_asking_again_doesn_t_help_is_raised_at_once(ask: Ask) -> None:
    with pytest.raises(StorageError, match="not allowed"):
        ask([StorageError("not allowed")])


def test_a_store_that_gives_no_answer_for_a_while_is_warned_of_early_and_now_and_then(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(ask([TransientStorageError("503")] * 4 + [None])) == 5
    assert caplog.messages == [], "it answers soon"
    ask()
    assert len(caplog.messages) in (2, 3)
    waited_s = float(caplog.messages[0].partition(" for ")[2].partition(" s")[0])
    assert 5 <= waited_s < 20
    assert caplog.messages[0].endswith("retrying for up to 90 s: 503 for /root/x")


def test_asking_a_store_draws_no_random_numbers_of_the_training() -> None:
    before = random.getstate()
    assert Patience(total_s=1.0).retry(lambda: 7) == 7
    assert list(Patience(total_s=1.0).pauses_s())
    assert random.getstate() == before


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 5_000_000])
def test_a_large_buffer_of_any_kind(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    expected = google_crc32c.value(data)
    assert crc32c(data) == crc32c(memoryview(data)) == crc32c(memoryview(data).cast("b")) == expected


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(min_value=1, max_value=50))
def test_blocks_do_not_depend_on_parts(parts: list[bytes], block_bytes: int) -> None:
    whole = b"".join(parts)
    blocks = [whole[start : start + block_bytes] for start in range(0, len(whole), block_bytes)]
    crcs = block_crcs(parts, block_bytes)
    assert crcs == tuple(google_crc32c.value(block) for block in blocks)
    assert combine_crc32c(crcs, block_bytes, len(whole)) == google_crc32c.value(whole)
    assert crc32c_of_parts(parts) == google_crc32c.value(whole)


def test_the_library_uses_the_processors_instructions() -> None:
    assert google_crc32c.implementation == "c", "the slow one in Python checks some MB a second"


MIB = 1024 * 1024
CONTENT = os.urandom(4 * MIB + 12_345)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "root")


def parts() -> list[bytes | memoryview]:
    """Parts that never begin or end at a block's border."""
    view, middle = memoryview(CONTENT), 2 * MIB + 5
    words = view[300_001:middle].cast("I")
    return [view[:1], b"", view[1:300_001], words, view[middle:]]


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
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
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
