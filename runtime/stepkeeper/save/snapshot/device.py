"""Copy XLA tensors on their devices, and fewer of them if the devices have no room.

torch_xla is imported only where tensors of it exist.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import DevicesFullError, SaveError
from stepkeeper.loggers import logger
from stepkeeper.time_limits import TimeLimits

if TYPE_CHECKING:
    # At run time it would import torch_xla.
    from stepkeeper_planners.adapters.xla_pieces import ClonePlan, DevicePiece

__all__ = ["DeviceCopies", "sum_device_bytes"]

_log: Final = logger(__name__)
_SMALLEST_LIMIT_BYTES: Final = 64 * 1024 * 1024
_LOOK_S: Final = 0.2


class DeviceCopies:
    """Make copies on the devices, as many as there is room for.

    Without a `budget_bytes` the limit is found by trial, because torch_xla doesn't report free memory if a program
    uses several devices. Everything is copied at first, and half as much after each refusal of the devices.
    """

    def __init__(
        self, budget_bytes: int | None, waits: Waits | None = None, limits: TimeLimits | None = None
    ) -> None:
        self._waits: Final = waits or Waits()
        self._limits: Final = limits or TimeLimits()
        self._learns: Final = budget_bytes is None
        self._limit_bytes: int | None = budget_bytes
        self._n_unreleased = self._unreleased_bytes = 0
        self._changed: Final = threading.Condition()

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that copies may take on this process's devices together; None: no limit was met yet."""
        return self._limit_bytes

    def make_copies(
        self,
        tensors: Mapping[str, torch.Tensor],
        clones: Mapping[str, "ClonePlan"],
        fqns: Sequence[str],
        *,
        timeout_s: float | None = None,
    ) -> tuple[list["DevicePiece"], list[str]]:
        """Start the copies of those tensors that the devices have room for, until `release_copies`.

        With a limit, this waits for earlier copies. Returns the copies' pieces, and the names of the tensors
        that are not copied. Raises SaveError if they don't fit a given budget, or the limit can't be found by
        trial; TimeoutError if earlier copies stay for longer than `timeout_s`, or SaveError without one, once
        they stay far longer than usual; RuntimeError if the devices fail; and as `Waits.check`.
        """
        while True:
            if self._limit_bytes is not None:
                self._wait_for_room(timeout_s)
            chosen, rest = _choose_within(self._limit_bytes, clones, fqns)
            try:
                made = self._dispatch_copies(tensors, clones, chosen)
            except RuntimeError as error:
                if not chosen or not _is_out_of_memory(error):
                    raise
                # Try again with fewer copies.
                self._check_may_learn(error, sum_device_bytes(clones, chosen))
                self._lower_limit(sum_device_bytes(clones, chosen))
            else:
                with self._changed:
                    self._n_unreleased += bool(chosen)
                    self._unreleased_bytes += sum_device_bytes(clones, chosen)
                return made, rest

    def release_copies(self) -> None:
        """Note that the copies of one call of `make_copies` are gone from the devices."""
        with self._changed:
            self._n_unreleased -= 1
            # An upper bound, for a time limit: the sizes of single calls aren't kept.
            self._unreleased_bytes = self._unreleased_bytes if self._n_unreleased else 0
            self._changed.notify_all()

    def handle_refusal(
        self, error: RuntimeError, clones: Mapping[str, "ClonePlan"], fqns: Iterable[str]
    ) -> None:
        """Handle an error of copies that were started: if the devices had no room, copy less from now on.

        Raises DevicesFullError then, or SaveError if this process may not find the limit by trial.
        """
        if not _is_out_of_memory(error):
            return
        self._check_may_learn(error, sum_device_bytes(clones, fqns))
        self._lower_limit(sum_device_bytes(clones, fqns))
        raise DevicesFullError(
            f"the devices had no room for a copy of the state, so the save failed ({error}); from the next "
            f"one on, {self._limit_bytes} bytes of it are copied there"
        ) from error

    def _wait_for_room(self, timeout_s: float | None) -> None:
        """Wait until earlier copies are gone. What doesn't fit beside them has to wait for them anyway."""
        limit_s = self._limits.transfer_s(self._unreleased_bytes) if timeout_s is None else timeout_s
        left_s, since_s = limit_s, time.monotonic()
        while True:
            look_s = min(_LOOK_S, max(0.0, left_s))
            with self._changed:
                if self._changed.wait_for(lambda: self._n_unreleased == 0, look_s):
                    return
            left_s -= look_s
            if left_s <= 0:
                break
            self._waits.check(since_s)
        still = f"copies of an earlier save are still on the devices after {limit_s:.1f} s"
        raise SaveError(still) if timeout_s is None else TimeoutError(still)

    def _dispatch_copies(
        self, tensors: Mapping[str, torch.Tensor], clones: Mapping[str, "ClonePlan"], fqns: Sequence[str]
    ) -> list["DevicePiece"]:
        if not fqns:
            return []
        from stepkeeper_planners.adapters import xla, xla_pieces

        pieces = [
            piece for fqn in fqns for piece in xla_pieces.clone_in_pieces(fqn, tensors[fqn], clones[fqn])
        ]
        try:
            # Otherwise a refusal would surface in the training's next use of the devices.
            xla.start_pending([piece.tensor for piece in pieces], until_running=True)
        except RuntimeError:
            xla_pieces.clear_failure()
            raise
        return pieces

    def _check_may_learn(self, error: RuntimeError, tried_bytes: int) -> None:
        """Raise SaveError if the budget was given, or other processes would have to find the same limit."""
        from stepkeeper_planners.adapters import xla_pieces

        if not self._learns:
            raise SaveError(
                f"the devices have no room for a copy of {tried_bytes} bytes of the state ({error}): pass "
                "Options with a smaller device_budget_bytes to CheckpointManager"
            ) from error
        if xla_pieces.is_multi_process_program():
            raise SaveError(
                f"the devices have no room for a copy of the state ({error}): pass Options with "
                "device_budget_bytes, the same on all ranks, to CheckpointManager: the rest is copied to the host "
                "while training waits"
            ) from error

    def _lower_limit(self, tried_bytes: int) -> None:
        half = tried_bytes // 2
        self._limit_bytes = half if half >= _SMALLEST_LIMIT_BYTES else 0
        _log.warning(
            "the devices have no room for a copy of %d bytes; from now on %d bytes of the state are copied there, "
            "and the train loop waits until the rest is on the host",
            tried_bytes,
            self._limit_bytes,
        )


def _choose_within(
    limit_bytes: int | None, clones: Mapping[str, "ClonePlan"], fqns: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Choose the tensors to copy within the limit, and return them and the others.

    Large ones take longest to move, so they are copied first.
    """
    if limit_bytes is None:
        return list(fqns), []
    chosen, left_bytes = set[str](), limit_bytes
    for fqn in sorted(fqns, key=lambda fqn: (-clones[fqn].device_bytes, fqn)):
        if 0 < clones[fqn].device_bytes <= left_bytes:
            chosen.add(fqn)
            left_bytes -= clones[fqn].device_bytes
    return [fqn for fqn in fqns if fqn in chosen], [fqn for fqn in fqns if fqn not in chosen]


def sum_device_bytes(clones: Mapping[str, "ClonePlan"], fqns: Iterable[str]) -> int:
    """Sum up the bytes of these tensors' copies on this process's devices."""
    return sum(clones[fqn].device_bytes for fqn in fqns)


def _is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
