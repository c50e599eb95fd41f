"""The inventory in a manifest: a rank's tensors and values, and the place of each in its objects."""

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Final

__all__ = ["ChunkRecord", "Inventory", "TensorRecord", "ValueRecord", "encode_json", "parse_tensor"]


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
    """One tensor, and its chunks. `fqn` is its name in the flattened state."""

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
    """The part of a manifest that doesn't depend on the save. Equal inventories may share one object, encoded once."""

    tensors: tuple[TensorRecord, ...] = ()
    values: tuple[ValueRecord, ...] = ()

    @cached_property
    def encoded(self) -> bytes:
        """The inventory as JSON in the manifest, encoded piece by piece, because it may be very long."""
        tensors = b",".join(encode_json(tensor) for tensor in self.tensors)
        values = b",".join(encode_json(value) for value in self.values)
        return b'"tensors":[%b],"values":[%b]' % (tensors, values)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `encoded`."""
        return sha256(self.encoded).digest()


_ENCODER: Final = json.JSONEncoder(
    sort_keys=True,
    separators=(",", ":"),
    default=lambda record: {name: getattr(record, name) for name in record.__slots__},
)


def encode_json(raw: object) -> bytes:
    """Encode a manifest's JSON: sorted keys, no spaces. A record is an object with its fields."""
    return _ENCODER.encode(raw).encode()


def parse_tensor(raw: Any) -> TensorRecord:
    """Build the record of a tensor from its JSON."""
    chunks = (
        ChunkRecord(**{**each, "offsets": tuple(each["offsets"]), "sizes": tuple(each["sizes"])})
        for each in raw["chunks"]
    )
    return TensorRecord(
        fqn=raw["fqn"], dtype=raw["dtype"], global_shape=tuple(raw["global_shape"]), chunks=tuple(chunks)
    )
