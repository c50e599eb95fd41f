"""Encode and decode manifest.<rank>.json, which lists a rank's objects, and where each tensor and value is in them."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from stepkeeper.checkpoint.inventory import Inventory, TensorRecord, ValueRecord, encode_json, parse_tensor
from stepkeeper.errors import ManifestError
from stepkeeper.log.records import ManifestRef
from stepkeeper.storage.base import ObjectStat
from stepkeeper.storage.crc import combine_crc32c, crc32c

__all__ = [
    "BLOCK_BYTES",
    "Manifest",
    "ObjectRecord",
    "Shardings",
    "checkpoint_folder",
    "claim_of",
    "is_object_name",
    "manifest_name",
    "sizes_by_folder",
    "split_inventory",
]

FORMAT: Final = 1
BLOCK_BYTES: Final = 16 * 1024 * 1024
"""The unit of verification: a read is verified by whole blocks."""

_NUMBER: Final = "(?:0|[1-9][0-9]*)"
_PATH: Final = re.compile(rf"({_NUMBER}/{_NUMBER}-[0-9a-f]{{32}})/([^/]+)")
"""Matches a path in the root: the folder of a save, and the name of an object in it."""

_OBJECT: Final = re.compile(rf"__{_NUMBER}_{_NUMBER}\.distcp|manifest\.{_NUMBER}\.json|\.metadata")


def checkpoint_folder(step: int, claim: int, nonce: str) -> str:
    """Return the folder of a save's objects, relative to the root."""
    return f"{step}/{claim}-{nonce}"


def claim_of(folder: str) -> int:
    """Return the slot of the claim that a save's folder belongs to."""
    return int(folder.partition("/")[2].partition("-")[0])


def sizes_by_folder(listed: Collection[ObjectStat]) -> dict[str, dict[str, int]]:
    """Return the sizes of the objects of each save's folder, by their names in it. Pure."""
    found: dict[str, dict[str, int]] = {}
    for stat in listed:
        match = _PATH.fullmatch(stat.path)
        if match is not None:
            found.setdefault(match[1], {})[match[2]] = stat.size_bytes
    return found


def manifest_name(rank: int) -> str:
    return f"manifest.{rank}.json"


def is_object_name(name: str) -> bool:
    """Return True if this package gives such names to objects in a checkpoint's folder."""
    return _OBJECT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """One object of a checkpoint, and its checksums."""

    path: str
    """Path relative to the checkpoint's folder, like every path in a manifest."""

    size_bytes: int
    blocks: tuple[int, ...]
    """crc32c of each block of BLOCK_BYTES; the last one may be shorter."""

    @property
    def crc32c(self) -> int:
        """crc32c of the whole object."""
        return combine_crc32c(self.blocks, BLOCK_BYTES, self.size_bytes)

    def make_ref(self) -> ManifestRef:
        """Build the reference that lets a reader verify this object, if it is a manifest."""
        return ManifestRef(path=self.path, size_bytes=self.size_bytes, crc32c=self.crc32c)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shardings:
    """The shardings of XLA tensors, marked by the user or chosen by XLA."""

    n_devices: int = 0
    """The number of devices that they were sharded over, in all processes."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    """XLA's text of each tensor's sharding. Tensors without a sharding are left out."""

    def to_raw(self) -> dict[str, object]:
        """Convert to plain JSON values. Each text appears once, even if many tensors have it."""
        names: dict[str, list[str]] = {}
        for fqn, text in sorted(self.by_name.items()):
            names.setdefault(text, []).append(fqn)
        # A list of pairs: a manifest's text is split at the key "tensors", and a tensor may have that name.
        return {"devices": self.n_devices, "names": sorted(names.items())}

    @classmethod
    def from_raw(cls, raw: Any) -> Self:
        """Convert the output of `to_raw` back."""
        by_name = {str(fqn): str(text) for text, names in raw["names"] for fqn in names}
        return cls(n_devices=int(raw["devices"]), by_name=by_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The part of a checkpoint that one rank wrote."""

    rank: int
    world_size: int
    step: int
    claim: int
    nonce: str
    objects: tuple[ObjectRecord, ...]
    """Objects of this rank; rank 0's manifest also lists `.metadata` and the other ranks' manifests."""

    inventory: Inventory
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied tensors → the name under which they were written."""

    shardings: Shardings = field(default_factory=Shardings)
    """In rank 0's manifest, the shardings of XLA tensors."""

    @property
    def tensors(self) -> tuple[TensorRecord, ...]:
        return self.inventory.tensors

    @property
    def values(self) -> tuple[ValueRecord, ...]:
        return self.inventory.values

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.claim, self.nonce)

    @property
    def size_bytes(self) -> int:
        """Total size of the objects that it lists."""
        return sum(record.size_bytes for record in self.objects)

    def make_ref(self) -> ManifestRef:
        """Build the reference that lets a reader verify this manifest."""
        data = self.to_json()
        return ManifestRef(path=manifest_name(self.rank), size_bytes=len(data), crc32c=crc32c(data))

    def to_json(self) -> bytes:
        """Encode the manifest with sorted keys. `split_inventory` relies on the keys around the inventory."""
        before = {
            "aliases": self.aliases,
            "block_bytes": BLOCK_BYTES,
            "claim": self.claim,
            "format": FORMAT,
            "nonce": self.nonce,
            "objects": [
                {"path": o.path, "size_bytes": o.size_bytes, "blocks": o.blocks} for o in self.objects
            ],
            "rank": self.rank,
            "step": self.step,
        }
        if self.shardings.by_name:
            before["shardings"] = self.shardings.to_raw()
        after: dict[str, object] = {"world_size": self.world_size}
        return b"%b,%b,%b" % (encode_json(before)[:-1], self.inventory.encoded, encode_json(after)[1:])

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """Decode a manifest; `where` names its object in errors. Raises ManifestError."""
        try:
            raw = json.loads(data)
            if (raw["format"], raw["block_bytes"]) != (FORMAT, BLOCK_BYTES):
                raise ManifestError(
                    f"{where} has format {raw['format']!r} with blocks of {raw['block_bytes']!r} bytes, this "
                    f"stepkeeper reads {FORMAT} with {BLOCK_BYTES}: use the release that wrote it, or a newer one"
                )
            return cls(
                rank=raw["rank"],
                world_size=raw["world_size"],
                step=raw["step"],
                claim=raw["claim"],
                nonce=raw["nonce"],
                objects=tuple(
                    ObjectRecord(path=o["path"], size_bytes=o["size_bytes"], blocks=tuple(o["blocks"]))
                    for o in raw["objects"]
                ),
                inventory=Inventory(
                    tensors=tuple(parse_tensor(item) for item in raw["tensors"]),
                    values=tuple(ValueRecord(**item) for item in raw["values"]),
                ),
                aliases=dict(raw.get("aliases", {})),
                shardings=Shardings.from_raw(raw["shardings"]) if "shardings" in raw else Shardings(),
            )
        except ManifestError:  # a ValueError too
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(f"{where} is no manifest: {error!r}") from error


def split_inventory(data: bytes, where: str) -> tuple[bytes, bytes]:
    """Split the output of `Manifest.to_json` into a few bytes without inventory, and the inventory's text.

    Raises ManifestError if there is none where `Manifest.to_json` puts it.
    """
    # JSON escapes quotation marks in strings, and no key before the inventory contains a list with that name.
    start, end = data.find(b',"tensors":[') + 1, data.rfind(b',"world_size":')
    if not 0 < start < end:
        raise ManifestError(f"{where} is no manifest that this stepkeeper wrote: it has no list of tensors")
    return data[:start] + Inventory().encoded + data[end:], data[start:end]
