"""Checksums of parts, of blocks, and of a whole from its blocks."""

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepkeeper.storage.crc import block_crcs, combine_crc32c, crc32c, crc32c_of_parts

CHECK = b"123456789"


def test_the_published_check_value() -> None:
    assert crc32c(CHECK) == 0xE3069283
    assert crc32c(memoryview(bytearray(CHECK))) == 0xE3069283
    assert crc32c(b"") == crc32c(memoryview(b"")) == 0


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
