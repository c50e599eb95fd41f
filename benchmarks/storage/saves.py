"""A rank's save to a bucket as the companion makes it, without the votes: objects, manifest, metadata."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Final

from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.finishing import finish_checkpoint
from stepkeeper.checkpoint.orders import SaveOrder, Structure, TensorOrder
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.storage.base import Store

__all__ = ["STATES", "data_bytes", "order_of", "save"]

STATES: Final = ("one tensor", "300 tensors", "a few of all sizes")


def _shapes(state: str, size_bytes: int) -> Sequence[tuple[int, ...]]:
    n_rows = size_bytes // 4096
    match state:
        case "one tensor":
            return [(n_rows, 1024)]
        case "300 tensors":
            return [(n_rows // 300, 1024)] * 300
        case _:
            # An embedding, layers, norms.
            return [(n_rows // 2, 1024), *[(n_rows // 18, 1024), (1024,), (n_rows // 54, 1024)] * 6]


def order_of(state: str, size_bytes: int) -> SaveOrder:
    """Make the order for a save of a state of that kind, of at most `size_bytes`."""
    tensors, start = [], 0
    for number, shape in enumerate(_shapes(state, size_bytes)):
        tensors.append(
            TensorOrder(
                fqn=f"w{number}",
                dtype="float32",
                global_shape=shape,
                offsets=(0,) * len(shape),
                sizes=shape,
                start=start,
            )
        )
        start += 4 * prod(shape)
    return SaveOrder(
        rank=0,
        world_size=1,
        step=1,
        claim=0,
        nonce="0" * 32,
        structure=Structure(tensors=tuple(tensors)),
        values=(),
    )


def data_bytes(order: SaveOrder) -> int:
    return sum(size_in_bytes(tensor.dtype, tensor.sizes) for tensor in order.tensors)


def save(store: Store, order: SaveOrder, data: memoryview) -> None:
    """Write a checkpoint to the store, ready for its commit entry."""
    order = replace(order, nonce=secrets.token_hex(16))
    finish_checkpoint(store, write_checkpoint(store, order, data), [])
