"""Copies of XLA tensors on their devices, and what is done where these have no room for them.

torch_xla is imported only where tensors of it exist.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from stepkeeper.errors import SaveError
from stepkeeper.loggers import logger
from stepkeeper_planners import adapters
from stepkeeper_planners.layout import Ranks, TensorLayout

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import Cut, Part, Piece

__all__ = [
    "DeviceCopies",
    "batches",
    "compile_moves",
    "cuts_of",
    "describe_cut",
    "moved",
    "run_pending",
    "to_copy",
]

_log: Final = logger(__name__)
_PIECE_BYTES: Final = 64 * 1024 * 1024
"""Moved by itself; torch_xla holds the GIL meanwhile. Each piece more is a little more to compile, once."""

_BATCH_BYTES: Final = 16 * 1024 * 1024
"""Of small ones so many bytes are moved together."""

_SMALLEST_LIMIT_BYTES: Final = _PIECE_BYTES


def run_pending(tensors: Mapping[str, torch.Tensor]) -> None:
    """What was put into XLA tensors is in them, not in a program that the first training step would become part of.

    A step that is compiled together with leftovers of a restore may round differently than the same step in an
    undisturbed run. The device's random numbers go on as if there had been no such call.
    """
    adapters.materialize(tensors)


def cuts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, "Cut"]:
    """How each of the XLA tensors is copied. Nothing is pending on them."""
    mine = {fqn: tensor for fqn, tensor in tensors.items() if tensor.device.type == "xla"}
    if not mine:
        return {}
    from stepkeeper_planners.adapters import xla_pieces

    return {fqn: xla_pieces.cut_of(fqn, tensor, _PIECE_BYTES) for fqn, tensor in mine.items()}


def describe_cut(fqn: str, tensor: torch.Tensor, cut: "Cut", ranks: Ranks) -> TensorLayout:
    """Where the parts of such a copy lie."""
    from stepkeeper_planners.adapters import xla_pieces

    return xla_pieces.describe_cut(fqn, tensor, cut, ranks)


def to_copy(cuts: Mapping[str, "Cut"], needed: Container[str]) -> list[str]:
    """The XLA tensors that are copied, of which this rank writes those that are `needed`."""
    if not cuts:
        return []
    from stepkeeper_planners.adapters import xla_pieces

    # A program that runs on the devices of several processes must be the same in all of them.
    everything = xla_pieces.is_one_program_of_many()
    return [fqn for fqn in cuts if everything or fqn in needed]


class DeviceCopies:
    """Makes copies on the devices, as many as there is room for.

    How much room there is, torch_xla doesn't say where a program uses several devices: without a `budget_bytes` it is
    found out. All is copied, and half as much from then on each time that the devices refuse.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self._learns: Final = budget_bytes is None
        self._limit_bytes: int | None = budget_bytes

    @property
    def limit_bytes(self) -> int | None:
        """What may be used on this process's devices together; None: no end to it was met yet."""
        return self._limit_bytes

    def make(
        self, tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, "Cut"], fqns: Sequence[str]
    ) -> tuple[list["Piece"], list[str]]:
        """Copies of those tensors of which the devices can have one, on their way; and the other ones' names."""
        while True:
            chosen, rest = _within(self._limit_bytes, cuts, fqns)
            try:
                return self._dispatched(tensors, cuts, chosen), rest
            except RuntimeError as error:
                if not chosen or not self._learns or not _is_out_of_memory(error):
                    raise
                self._refuse_to_guess()
                self._lower(sum(cuts[fqn].device_bytes for fqn in chosen))

    def refused(self, error: BaseException, used_bytes: int) -> None:
        """Copies of so many bytes were not made after all: if for lack of room, fewer are tried from now on."""
        if self._learns and isinstance(error, RuntimeError) and _is_out_of_memory(error):
            self._lower(used_bytes)

    def _dispatched(
        self, tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, "Cut"], fqns: Sequence[str]
    ) -> list["Piece"]:
        if not fqns:
            return []
        from stepkeeper_planners.adapters import xla, xla_pieces

        pieces = [piece for fqn in fqns for piece in xla_pieces.clone_in_pieces(fqn, tensors[fqn], cuts[fqn])]
        try:
            # Otherwise a refusal would come up in whatever the training asks of the devices next.
            xla.start([piece.tensor for piece in pieces], until_running=self._learns)
        except RuntimeError:
            xla_pieces.forget_failure()
            raise
        return pieces

    def _refuse_to_guess(self) -> None:
        """Nothing, unless the other processes of one program would have to guess the same.

        Raises:
            SaveError: they would.

        """
        from stepkeeper_planners.adapters import xla_pieces

        if xla_pieces.is_one_program_of_many():
            raise SaveError(
                "the devices have no room for a copy of the state; give CheckpointManager device_budget_bytes, the "
                "same on all ranks: what it leaves over is copied to the host while training waits"
            )

    def _lower(self, tried_bytes: int) -> None:
        half = tried_bytes // 2
        self._limit_bytes = half if half >= _SMALLEST_LIMIT_BYTES else 0
        _log.warning(
            "the devices have no room for a copy of %d bytes; from now on %d bytes of the state are copied there, "
            "and the train loop waits until the rest is on the host",
            tried_bytes,
            self._limit_bytes,
        )


def moved(
    tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, "Cut"], fqns: Sequence[str]
) -> Iterator[tuple[str, list["Part"]]]:
    """The elements of these tensors on the host, a piece at a time: without copies on the devices but of that piece."""
    if not fqns:
        return
    from stepkeeper_planners.adapters import xla_pieces

    small = [fqn for fqn in fqns if cuts[fqn].n_pieces == 1]
    for batch in batches([xla_pieces.as_it_is(fqn, tensors[fqn], cuts[fqn]) for fqn in small]):
        yield from ((piece.fqn, parts) for piece, parts in xla_pieces.move(batch))
    for piece in _one_by_one(tensors, cuts, fqns):
        xla_pieces.wait_until_there([piece])
        yield from ((each.fqn, parts) for each, parts in xla_pieces.move([piece]))


def compile_moves(
    tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, "Cut"], fqns: Sequence[str]
) -> None:
    """`moved` with these arguments compiles nothing any more."""
    for _ in _one_by_one(tensors, cuts, fqns):
        pass


def _one_by_one(
    tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, "Cut"], fqns: Sequence[str]
) -> Iterator["Piece"]:
    """The pieces of large tensors, each copied when its turn comes."""
    large = [fqn for fqn in fqns if cuts[fqn].n_pieces > 1]
    if not large:
        return
    from stepkeeper_planners.adapters import xla, xla_pieces

    for fqn in large:
        for piece in xla_pieces.clone_in_pieces(fqn, tensors[fqn], cuts[fqn]):
            xla.start([piece.tensor])
            yield piece


def batches(pieces: Sequence["Piece"]) -> Iterator[list["Piece"]]:
    """What is moved together: what is large by itself."""
    batch: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        if batch and size_bytes + piece.size_bytes > _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(piece)
        size_bytes += piece.size_bytes
    if batch:
        yield batch


def _within(
    limit_bytes: int | None, cuts: Mapping[str, "Cut"], fqns: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Those that a copy is made of, and the others. Large ones first: it is these that take long to move."""
    if limit_bytes is None:
        return list(fqns), []
    chosen, left_bytes = set[str](), limit_bytes
    for fqn in sorted(fqns, key=lambda fqn: (-cuts[fqn].device_bytes, fqn)):
        if 0 < cuts[fqn].device_bytes <= left_bytes:
            chosen.add(fqn)
            left_bytes -= cuts[fqn].device_bytes
    return [fqn for fqn in fqns if fqn in chosen], [fqn for fqn in fqns if fqn not in chosen]


def _is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
