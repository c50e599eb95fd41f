"""Parse the header of a safetensors file, and check it before anything relies on it. Pure."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

import torch

from stepkeeper_planners.errors import SourceError, printable
from stepkeeper_planners.formats.safetensors.shard_files import DTYPES

__all__ = ["MAX_HEADER_BYTES", "DuplicateKeys", "HeaderEntry", "parse_header", "parse_json"]

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that the format's own library has."""

_MOST_DIMENSIONS: Final = 64
"""torch's limit."""
_MOST_BYTES: Final = 2**63 - 1
_BY_NAME: Final = {name: dtype for dtype, name in DTYPES.items()}
_KEYS: Final = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderEntry:
    """A tensor in the file, as the header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The offset of its first byte, counted from the end of the header."""
    end: int


class DuplicateKeys(dict[str, Any]):
    """A JSON object in which a name stands twice. Readers differ in which of the two they take."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.name = Counter(name for name, _ in pairs).most_common(1)[0][0]


def parse_json(text: bytes) -> Any:
    """Parse the text; an object with a name that stands twice becomes `DuplicateKeys`.

    Raises:
        ValueError, RecursionError: the text is no JSON.
    """
    return json.loads(text.decode(), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else DuplicateKeys(pairs)


def parse_header(text: bytes, data_bytes: int, *, where: str) -> list[HeaderEntry]:
    """Parse a header, and return the file's tensors in the order of their bytes.

    Args:
        text: the header's bytes.
        data_bytes: the number of bytes behind the header.
        where: the file, for errors.

    Raises:
        SourceError: the header is damaged or hostile; it names the file and the tensor.
    """
    try:
        header = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{where} is no safetensors file, damaged or cut off: its header is no JSON ({error!s:.200})"
        ) from error
    if type(header) is DuplicateKeys:
        raise SourceError(f"{where}: {printable(header.name)} stands twice in the header")
    if type(header) is not dict:
        raise SourceError(f"{where} is no safetensors file, damaged or cut off: its header is no object")
    header.pop("__metadata__", None)
    entries = sorted(
        (_parse_entry(name, described, where) for name, described in header.items()),
        key=lambda stored: (stored.start, stored.end),
    )
    for complaint in _find_misplaced(entries, data_bytes):
        raise SourceError(f"{where}: {complaint}")
    return entries


def _parse_entry(name: str, described: Any, where: str) -> HeaderEntry:
    about = f"{where}: {printable(name)}"
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{about} has half a character in its name") from error
    if type(described) is DuplicateKeys:
        raise SourceError(f"{about}: {printable(described.name)} stands twice in its description")
    if type(described) is not dict or described.keys() != _KEYS:
        raise SourceError(f"{about} isn't described by its dtype, shape and data_offsets alone")
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if type(dtype) is not str or dtype not in _BY_NAME:
        raise SourceError(
            f"{about} has dtype {printable(str(dtype))}, of which torch has no tensors that can be read"
        )
    if not _are_lengths(shape) or len(shape) > _MOST_DIMENSIONS:
        raise SourceError(f"{about} has no shape that a tensor can have")
    if not _are_lengths(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SourceError(f"{about} has no data_offsets that a tensor can have")
    item_bytes = _BY_NAME[dtype].itemsize
    if prod(max(size, 1) for size in shape) * item_bytes > _MOST_BYTES:
        raise SourceError(f"{about} has a shape of more elements than any memory has room for")
    start, end = offsets
    if prod(shape) * item_bytes != end - start:
        raise SourceError(
            f"{about} needs {prod(shape) * item_bytes} bytes for shape {shape} of {dtype}, and has {end - start}"
        )
    return HeaderEntry(name=name, dtype=_BY_NAME[dtype], shape=tuple(shape), start=start, end=end)


def _are_lengths(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and 0 <= item <= _MOST_BYTES for item in value)


def _find_misplaced(entries: Sequence[HeaderEntry], data_bytes: int) -> Iterator[str]:
    """Yield what is wrong with the tensors' offsets: each byte behind the header must belong to one tensor."""
    full = [stored for stored in entries if stored.start != stored.end]
    for stored in entries:
        if stored.end > data_bytes:
            yield (
                f"{printable(stored.name)} should end at byte {stored.end} behind the header, where the file has "
                f"{data_bytes}; it is damaged or cut off"
            )
    for before, after in pairwise(full):
        if after.start < before.end:
            yield f"{printable(before.name)} and {printable(after.name)} lie over each other"
    ends = [0, *(stored.end for stored in full)]
    starts = [*(stored.start for stored in full), data_bytes]
    for end, start in zip(ends, starts, strict=True):
        if end != start:
            yield f"bytes {end} to {start} behind the header belong to no tensor"
