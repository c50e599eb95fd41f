"""The state after the last finished step, for as long as it is known that nothing has begun to change it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepkeeper_planners.state import gather_state

__all__ = ["LastState"]


class LastState:
    """What may be saved when an exception ends a training between two steps, or in the forward or backward of one.

    It is given up as soon as any optimizer begins a step, or a tensor of it was written to; torch counts the writes to
    each tensor. Values that are no tensors are taken as they are when they are saved.
    """

    def __init__(self) -> None:
        self._step = 0
        self._state: Mapping[str, object] | None = None
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._collected: Mapping[str, object] | None = None
        self._counted = True
        self._n_writes = 0
        self._hook = register_optimizer_step_pre_hook(self._begins)

    def finished(self, step: int, state: Mapping[str, object]) -> None:
        """`state` is what it is after `step`. Its tensors are listed anew when it is another object."""
        if state is not self._collected:
            self._tensors = tuple(gather_state(state).tensors.values())
            self._collected = state
            # Of tensors made in inference mode nobody counts the writes.
            self._counted = not any(tensor.is_inference() for tensor in self._tensors)
        self._step, self._state = step, state if self._counted else None
        self._n_writes = self._count()

    def intact(self) -> tuple[int, Mapping[str, object]] | None:
        """The last finished step and its state; None if something has begun to change it, or none was finished."""
        if self._state is None or self._count() != self._n_writes:
            return None
        return self._step, self._state

    def close(self) -> None:
        """Optimizers are watched no more, and nothing is kept alive."""
        self._hook.remove()
        self._state = self._collected = None
        self._tensors = ()

    def _count(self) -> int:
        if not self._counted:
            return 0
        return sum(tensor._version for tensor in self._tensors)  # noqa: SLF001  # torch's own name for it

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002  # torch's
        self._state = None
