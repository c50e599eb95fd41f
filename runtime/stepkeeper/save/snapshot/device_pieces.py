"""Plan how XLA tensors are copied in pieces, and move the pieces to the host.

torch_xla is imported only where tensors of it exist.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.saving.assignment import TensorWrite

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import ClonePlan, DevicePiece, HostPart

__all__ = ["batch_pieces", "compile_moves", "describe_clone", "move_tensors", "plan_clones", "select_copied"]

_PIECE_BYTES: Final = 16 * 1024 * 1024
"""The size of pieces, and of small ones that are moved together. torch_xla holds the GIL while it moves them. Larger
pieces take twice as long, since their memory is faulted in each time. Smaller pieces cost compile time, once."""

_WAITED_PIECE_BYTES: Final = 64 * 1024 * 1024
"""The size of pieces while training waits anyway. Each piece is a separate program there."""


def plan_clones(tensors: Mapping[str, torch.Tensor]) -> dict[str, "ClonePlan"]:
    """Plan how each of the XLA tensors is copied. No computation may be pending on them."""
    if "torch_xla" not in sys.modules:
        return {}
    mine = {fqn: tensor for fqn, tensor in tensors.items() if tensor.device.type == "xla"}
    if not mine:
        return {}
    from stepkeeper_planners.adapters import xla_pieces

    return {fqn: xla_pieces.plan_clone(fqn, tensor, _PIECE_BYTES) for fqn, tensor in mine.items()}


def describe_clone(fqn: str, tensor: torch.Tensor, clone: "ClonePlan", ranks: Ranks) -> TensorLayout:
    """Describe where the parts of such a copy lie."""
    from stepkeeper_planners.adapters import xla_pieces

    return xla_pieces.describe_clone(fqn, tensor, clone, ranks)


def select_copied(clones: Mapping[str, "ClonePlan"], writes: Sequence[TensorWrite]) -> list[str]:
    """Select the XLA tensors that are copied on the devices: those that this rank writes."""
    if not clones:
        return []
    from stepkeeper_planners.adapters import xla_pieces

    # A program that runs on the devices of several processes must be the same in all of them.
    everything = xla_pieces.is_multi_process_program()
    needed = {write.fqn for write in writes}
    return [fqn for fqn in clones if everything or fqn in needed]


def move_tensors(
    tensors: Mapping[str, torch.Tensor], clones: Mapping[str, "ClonePlan"], fqns: Sequence[str]
) -> Iterator[list[tuple[str, list["HostPart"]]]]:
    """Move these tensors to the host piece by piece, and yield their names with parts of their elements.

    There is a copy of one piece at a time on the devices.
    """
    if not fqns:
        return
    from stepkeeper_planners.adapters import xla_pieces

    small = [fqn for fqn in fqns if clones[fqn].n_pieces == 1]
    pieces = [xla_pieces.piece_without_copy(fqn, tensors[fqn], clones[fqn]) for fqn in small]
    for batch in batch_pieces(pieces):
        yield [(piece.fqn, parts) for piece, parts in xla_pieces.move_to_host(batch)]
    for piece in _copy_piece_by_piece(tensors, clones, fqns):
        xla_pieces.wait_until_computed([piece])
        yield [(each.fqn, parts) for each, parts in xla_pieces.move_to_host([piece])]


def compile_moves(
    tensors: Mapping[str, torch.Tensor], clones: Mapping[str, "ClonePlan"], fqns: Sequence[str]
) -> None:
    """Compile the programs that `move_tensors` needs for these arguments."""
    for _ in _copy_piece_by_piece(tensors, clones, fqns):
        pass


def _copy_piece_by_piece(
    tensors: Mapping[str, torch.Tensor], clones: Mapping[str, "ClonePlan"], fqns: Sequence[str]
) -> Iterator["DevicePiece"]:
    """Copy the pieces of large tensors, each when its turn comes."""
    large = [fqn for fqn in fqns if clones[fqn].n_pieces > 1]
    if not large:
        return
    from stepkeeper_planners.adapters import xla, xla_pieces

    for fqn in large:
        clone = xla_pieces.with_fewer_pieces(clones[fqn], _WAITED_PIECE_BYTES)
        for piece in xla_pieces.clone_in_pieces(fqn, tensors[fqn], clone):
            xla.start_pending([piece.tensor])
            yield piece


def batch_pieces(pieces: Sequence["DevicePiece"]) -> Iterator[list["DevicePiece"]]:
    """Group pieces that are moved together; a large one is moved by itself."""
    batch: list[DevicePiece] = []
    size_bytes = 0
    for piece in pieces:
        if batch and size_bytes + piece.size_bytes > _PIECE_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(piece)
        size_bytes += piece.size_bytes
    if batch:
        yield batch
