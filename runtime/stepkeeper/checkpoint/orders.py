"""The order for a rank's share of a save: the structure, which many saves share, and the parts of one save."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple, Self, TypeVar

from stepkeeper.checkpoint.manifest import Shardings, checkpoint_folder

__all__ = ["SaveOrder", "Structure", "TensorOrder", "ValueOrder"]

T = TypeVar("T")


class TensorOrder(NamedTuple):
    """A box of a tensor to write: row-major elements from byte `start` on in the rank's data."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrder:
    """A value to write: its torch.save bytes, from byte `start` on in the rank's data."""

    fqn: str
    start: int
    length_bytes: int


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The part of a state that determines what one rank writes. It stays equal while only contents change."""

    tensors: tuple[TensorOrder, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors → the name under which they are written."""

    shardings: Shardings = field(default_factory=Shardings)
    """The shardings of XLA tensors, for restores. They don't affect what is written otherwise."""

    key_paths: str = "{}"
    """JSON: each name → the keys that lead to it in the nested state, and notes on nesting that names don't show."""

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read an equal structure from its `text`. Equal parts of its tensors share one object."""
        aliases, shardings, key_paths, *lines = text.split("\n")
        read = cls(
            tensors=_read_orders(lines),
            aliases=json.loads(aliases),
            shardings=Shardings.from_raw(json.loads(shardings)),
            key_paths=key_paths,
        )
        # Fill the cached property with the key of the text, so that it isn't computed again.
        vars(read)["key"] = _digest_text(text)
        return read

    @cached_property
    def text(self) -> str:
        """The structure as lines of JSON: aliases, shardings, key paths, and one line for each tensor."""
        # Encode each order separately: one call for all of them would hold the GIL all the while.
        orders = (
            json.dumps([o.fqn, o.dtype, o.global_shape, o.offsets, o.sizes, o.start]) for o in self.tensors
        )
        aliases = json.dumps(dict(self.aliases), sort_keys=True)
        shardings = json.dumps(self.shardings.to_raw())
        return "\n".join((aliases, shardings, self.key_paths, *orders))

    @cached_property
    def key(self) -> str:
        """SHA-256 of `text`: identifies equal structures in every process."""
        return _digest_text(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """The share of a save that one rank has to write."""

    rank: int
    world_size: int
    step: int
    claim: int
    """Slot of the claim."""

    nonce: str
    """The save's nonce, from `new_nonce()`, the same on all ranks."""

    structure: Structure
    values: tuple[ValueOrder, ...] = ()

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.claim, self.nonce)

    @property
    def tensors(self) -> tuple[TensorOrder, ...]:
        return self.structure.tensors


def _digest_text(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _read_orders(lines: Iterable[str]) -> tuple[TensorOrder, ...]:
    """Read the orders. Equal parts share one object: most tensors of a state have the shape of another."""
    alike: dict[object, object] = {}

    def shared(value: T) -> T:
        return alike.setdefault(value, value)  # type: ignore[return-value]  # each stands for itself

    orders = []
    for line in lines:
        fqn, dtype, global_shape, offsets, sizes, start = json.loads(line)
        order = TensorOrder(
            fqn=fqn,
            dtype=shared(dtype),
            global_shape=shared(tuple(global_shape)),
            offsets=shared(tuple(offsets)),
            sizes=shared(tuple(sizes)),
            start=start,
        )
        orders.append(order)
    return tuple(orders)
