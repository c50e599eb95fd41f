"""Copies of XLA tensors on their devices, and what is done where these have no room for them.

torch_xla is imported only where tensors of it exist.
"""

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from stepkeeper.errors import DevicesFullError, SaveError
from stepkeeper.loggers import logger
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout

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
    "to_copy",
]

_log: Final = logger(__name__)
_PIECE_BYTES: Final = 16 * 1024 * 1024
"""Moved together; torch_xla holds the GIL meanwhile. Larger ones are faulted into memory anew each time and take twice
as long; each one more is a little more to compile, once."""

_WAITED_PIECE_BYTES: Final = 64 * 1024 * 1024
"""The same where training waits all along: each piece is a program of its own there."""

_SMALLEST_LIMIT_BYTES: Final = 64 * 1024 * 1024
_LONGEST_TRANSFER_S: Final = 3600.0


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
        self._n_out = 0
        self._changed: Final = threading.Condition()

    @property
    def limit_bytes(self) -> int | None:
        """What may be used on this process's devices together; None: no end to it was met yet."""
        return self._limit_bytes

    def make(
        self,
        tensors: Mapping[str, torch.Tensor],
        cuts: Mapping[str, "Cut"],
        fqns: Sequence[str],
        *,
        timeout_s: float | None = None,
    ) -> tuple[list["Piece"], list[str]]:
        """Copies of those tensors of which the devices can have one, on their way; and the other ones' names.

        They count against the budget until `left` is told of them: where there is one, earlier ones are waited for.

        Raises:
            SaveError: they don't fit the budget that was given, or several processes would have to find out alike how
                many do.
            TimeoutError: earlier ones are still there after `timeout_s`. Without it, a SaveError after an hour.
            RuntimeError: the devices failed.

        """
        while True:
            if self._limit_bytes is not None:
                self._wait_for_room(timeout_s)
            chosen, rest = _within(self._limit_bytes, cuts, fqns)
            try:
                made = self._dispatched(tensors, cuts, chosen)
            except RuntimeError as error:
                if not chosen or not _is_out_of_memory(error):
                    raise
                self._refuse_to_guess(error, _device_bytes(cuts, chosen))
                self._lower(_device_bytes(cuts, chosen))
            else:
                with self._changed:
                    self._n_out += bool(chosen)
                return made, rest

    def left(self) -> None:
        """The copies of one call of `make` are on the devices no more."""
        with self._changed:
            self._n_out -= 1
            self._changed.notify_all()

    def refused(self, error: RuntimeError, cuts: Mapping[str, "Cut"], fqns: Iterable[str]) -> None:
        """The copies of these were not made after all: if for lack of room, fewer are tried from now on.

        Raises:
            DevicesFullError: it is for that, and the next save will do with less.
            SaveError: it is for that, and the budget was given, or would have to be found out by several processes.

        """
        if not _is_out_of_memory(error):
            return
        self._refuse_to_guess(error, _device_bytes(cuts, fqns))
        self._lower(_device_bytes(cuts, fqns))
        raise DevicesFullError(
            f"the devices had no room for a copy of the state, and the save came to nothing ({error}); from the next "
            f"one on {self._limit_bytes} bytes of it are copied there"
        ) from error

    def _wait_for_room(self, timeout_s: float | None) -> None:
        """Copies leave by themselves, and what the devices have no room for would wait for their transfer anyway."""
        limit_s = _LONGEST_TRANSFER_S if timeout_s is None else timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: self._n_out == 0, limit_s):
                still = f"copies of an earlier save are still on the devices after {limit_s:.1f} s"
                raise SaveError(still) if timeout_s is None else TimeoutError(still)

    def _dispatched(
        self, tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, "Cut"], fqns: Sequence[str]
    ) -> list["Piece"]:
        if not fqns:
            return []
        from stepkeeper_planners.adapters import xla, xla_pieces

        pieces = [piece for fqn in fqns for piece in xla_pieces.clone_in_pieces(fqn, tensors[fqn], cuts[fqn])]
        try:
            # Otherwise a refusal would come up in whatever the training asks of the devices next.
            xla.start([piece.tensor for piece in pieces], until_running=True)
        except RuntimeError:
            xla_pieces.forget_failure()
            raise
        return pieces

    def _refuse_to_guess(self, error: RuntimeError, tried_bytes: int) -> None:
        """Nothing, unless how much is copied was given, or other processes of one program would have to guess alike.

        Raises:
            SaveError: one of these.

        """
        from stepkeeper_planners.adapters import xla_pieces

        if not self._learns:
            raise SaveError(
                f"the devices have no room for a copy of {tried_bytes} bytes of the state ({error}): give "
                "CheckpointManager a smaller device_budget_bytes"
            ) from error
        if xla_pieces.is_one_program_of_many():
            raise SaveError(
                f"the devices have no room for a copy of the state ({error}): give CheckpointManager "
                "device_budget_bytes, the same on all ranks: what it leaves over is copied to the host while training "
                "waits"
            ) from error

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
) -> Iterator[list[tuple[str, list["Part"]]]]:
    """The elements of these tensors on the host, a piece at a time: without copies on the devices but of that piece."""
    if not fqns:
        return
    from stepkeeper_planners.adapters import xla_pieces

    small = [fqn for fqn in fqns if cuts[fqn].n_pieces == 1]
    for batch in batches([xla_pieces.as_it_is(fqn, tensors[fqn], cuts[fqn]) for fqn in small]):
        yield [(piece.fqn, parts) for piece, parts in xla_pieces.move(batch)]
    for piece in _one_by_one(tensors, cuts, fqns):
        xla_pieces.wait_until_there([piece])
        yield [(each.fqn, parts) for each, parts in xla_pieces.move([piece])]


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
        cut = xla_pieces.coarser(cuts[fqn], _WAITED_PIECE_BYTES)
        for piece in xla_pieces.clone_in_pieces(fqn, tensors[fqn], cut):
            xla.start([piece.tensor])
            yield piece


def batches(pieces: Sequence["Piece"]) -> Iterator[list["Piece"]]:
    """What is moved together: what is large by itself."""
    batch: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        if batch and size_bytes + piece.size_bytes > _PIECE_BYTES:
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


def _device_bytes(cuts: Mapping[str, "Cut"], fqns: Iterable[str]) -> int:
    return sum(cuts[fqn].device_bytes for fqn in fqns)


def _is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
