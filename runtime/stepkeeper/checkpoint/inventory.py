"""List a rank's tensors and values, and where each is in its objects, as a manifest has them."""

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Final

__all__ = [
    "ChunkRecord",
    "Inventory",
    "TensorRecord",
    "ValueRecord",
    "encode_json",
    "parse_tensor",
]

_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """One box of a tensor, and where its tensor file is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: str
    offset_bytes: int
    """Offset of the tensor file in the object."""

    length_bytes: int
    """Length of the tensor file."""

    data_offset_bytes: int
    """Offset of the raw elements in the tensor file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor, and its chunks."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]
    """The chunks that this rank wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRecord:
    """One value, and where its bytes are."""

    fqn: str
    path: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The part of a manifest that doesn't depend on the save. Equal inventories may be one object, encoded once."""

    tensors: tuple[TensorRecord, ...] = ()
    values: tuple[ValueRecord, ...] = ()

    @cached_property
    def encoded(self) -> bytes:
        """The inventory as JSON in the manifest, encoded piece by piece, because it may be very long."""
        tensors = b",".join(encode_json(_tensor_to_json(tensor)) for tensor in self.tensors)
        values = b",".join(encode_json(_value_to_json(value)) for value in self.values)
        return b'"tensors":[%b],"values":[%b]' % (tensors, values)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `encoded`."""
        return sha256(self.encoded).digest()


def encode_json(raw: dict[str, object]) -> bytes:
    """Encode a manifest's JSON: sorted keys, no spaces."""
    return _ENCODER.encode(raw).encode()


def _tensor_to_json(tensor: TensorRecord) -> dict[str, object]:
    return {
        "fqn": tensor.fqn,
        "dtype": tensor.dtype,
        "global_shape": tensor.global_shape,
        "chunks": [
            {
                "offsets": chunk.offsets,
                "sizes": chunk.sizes,
                "path": chunk.path,
                "offset_bytes": chunk.offset_bytes,
                "length_bytes": chunk.length_bytes,
                "data_offset_bytes": chunk.data_offset_bytes,
            }
            for chunk in tensor.chunks
        ],
    }


def _value_to_json(value: ValueRecord) -> dict[str, object]:
    return {
        "fqn": value.fqn,
        "path": value.path,
        "offset_bytes": value.offset_bytes,
        "length_bytes": value.length_bytes,
    }


def parse_tensor(raw: Any) -> TensorRecord:
    """Build the record of a tensor from its JSON."""
    return TensorRecord(
        fqn=raw["fqn"],
        dtype=raw["dtype"],
        global_shape=tuple(raw["global_shape"]),
        chunks=tuple(_parse_chunk(item) for item in raw["chunks"]),
    )


def _parse_chunk(raw: Any) -> ChunkRecord:
    return ChunkRecord(
        offsets=tuple(raw["offsets"]),
        sizes=tuple(raw["sizes"]),
        path=raw["path"],
        offset_bytes=raw["offset_bytes"],
        length_bytes=raw["length_bytes"],
        data_offset_bytes=raw["data_offset_bytes"],
    )
