"""The inventory in a manifest: a rank's tensors and values, and the place of each in its objects."""

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Final, NamedTuple

__all__ = ["ChunkRecord", "Inventory", "TensorRecord", "ValueRecord", "encode_json", "parse_tensor"]


class ChunkRecord(NamedTuple):
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


class TensorRecord(NamedTuple):
    """One tensor, and its chunks. `fqn` is its name in the flattened state."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]
    """The chunks that this rank wrote."""


class ValueRecord(NamedTuple):
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
        tensors = b",".join(map(_encode_tensor, self.tensors))
        values = b",".join(encode_json(value._asdict()) for value in self.values)
        return b'"tensors":[%b],"values":[%b]' % (tensors, values)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `encoded`."""
        return sha256(self.encoded).digest()


_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def encode_json(raw: object) -> bytes:
    """Encode a manifest's JSON: sorted keys, no spaces."""
    return _ENCODER.encode(raw).encode()


def _encode_tensor(tensor: TensorRecord) -> bytes:
    chunks = [chunk._asdict() for chunk in tensor.chunks]
    return encode_json({**tensor._asdict(), "chunks": chunks})


def parse_tensor(raw: Any) -> TensorRecord:
    """Build the record of a tensor from its JSON, whose lists are replaced."""
    for each in raw["chunks"]:
        each["offsets"], each["sizes"] = tuple(each["offsets"]), tuple(each["sizes"])
    return TensorRecord(
        fqn=raw["fqn"],
        dtype=raw["dtype"],
        global_shape=tuple(raw["global_shape"]),
        chunks=tuple([ChunkRecord(**each) for each in raw["chunks"]]),
    )
