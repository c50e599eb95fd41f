"""Lay out safetensors files in bytes, and divide tensors among several files. Pure."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from stepkeeper_planners.errors import UnsupportedValueError, printable
from stepkeeper_planners.formats.reporting import join_names

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "INDEX_SUFFIX",
    "SUFFIX",
    "ShardFile",
    "TensorEntry",
    "build_index",
    "make_entry",
    "plan_shard_files",
]

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
INDEX_NAME: Final = "model.safetensors.index.json"

DTYPES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor that is written to a file."""

    source: str
    """Its name in the source."""
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """The size of all elements, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One file of the result."""

    file_name: str
    entries: tuple[TensorEntry, ...]
    """Its tensors, in the order of their bytes."""

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Build the bytes that come before the tensors' bytes."""
        described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset_bytes = 0
        for entry in self.entries:
            described[entry.name] = {
                "dtype": DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset_bytes, offset_bytes + entry.n_bytes],
            }
            offset_bytes += entry.n_bytes
        text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def make_entry(source: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorEntry:
    """Build the entry for a tensor under its new name.

    Raises UnsupportedValueError if the format has no such dtype, or no such name.
    """
    if dtype not in DTYPES:
        known = sorted(str(each).removeprefix("torch.") for each in DTYPES)
        raise UnsupportedValueError(
            f"{printable(source)}: safetensors has no {str(dtype).removeprefix('torch.')}; convert the tensor to one "
            f"of {join_names(known, len(known))}, or leave it out"
        )
    if name == "__metadata__":
        raise UnsupportedValueError(
            f"{printable(source)}: no tensor can be named {printable(name)} in a safetensors file; rename it"
        )
    return TensorEntry(source=source, name=name, dtype=dtype, shape=shape)


def plan_shard_files(entries: Sequence[TensorEntry], max_shard_bytes: int | None) -> tuple[ShardFile, ...]:
    """Divide the tensors among files with Hugging Face's names; into one if `max_shard_bytes` is None.

    Only a file of a single tensor may be larger than that.
    """
    limit_bytes = math.inf if max_shard_bytes is None else max_shard_bytes
    groups: list[list[TensorEntry]] = []
    room_bytes = limit_bytes
    for entry in entries:
        if not groups or entry.n_bytes > room_bytes:
            groups.append([])
            room_bytes = limit_bytes
        groups[-1].append(entry)
        room_bytes -= entry.n_bytes
    return tuple(
        ShardFile(file_name=_file_name(number, len(groups)), entries=_aligned(group))
        for number, group in enumerate(groups, 1)
    )


def build_index(shards: Sequence[ShardFile]) -> bytes:
    """Build the index file, which maps each tensor to its file."""
    index = {
        "metadata": {"total_size": sum(entry.n_bytes for shard in shards for entry in shard.entries)},
        "weight_map": {entry.name: shard.file_name for shard in shards for entry in shard.entries},
    }
    return json.dumps(index, ensure_ascii=False, indent=2).encode() + b"\n"


def _aligned(entries: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Sort wide elements first, so that each tensor starts at a multiple of its elements' size."""
    return tuple(sorted(entries, key=lambda entry: -entry.dtype.itemsize))


def _file_name(number: int, n_files: int) -> str:
    return "model.safetensors" if n_files == 1 else f"model-{number:05}-of-{n_files:05}.safetensors"
