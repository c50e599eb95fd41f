"""Compare the forms of thousands of ordinary tensors with those of earlier ones, in a few passes in C."""

from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Any, Final

import torch
from torch._C._dynamo.guards import TensorGuards

__all__ = ["ORDINARY", "OrdinaryForms", "are_ordinary"]

ORDINARY: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Torch's own classes. A CPU tensor of one of them, without attributes, is an ordinary one."""

_BLOCK: Final = 2048
"""The number of tensors that are compared at once. For the second pass they are in the processor's cache."""

_INDEXES: Final = list(range(_BLOCK))
_attributes: Final = attrgetter("__dict__")
_is_nested: Final = attrgetter("is_nested")
_form: Final = attrgetter("dtype", "layout", "shape", "is_cpu")
_SHAPE: Final = 2
_kind: Final = attrgetter("is_cpu", "layout", "is_nested")
_STRIDED: Final = frozenset({(True, torch.strided, False)})


def are_ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all are ordinary and strided, and none is nested. In a few passes in C."""
    return (
        ORDINARY.issuperset(map(type, tensors))
        and _STRIDED.issuperset(map(_kind, tensors))
        and not any(map(_attributes, tensors))
    )


class OrdinaryForms:
    """The forms of ordinary and strided tensors, in order, and the places in memory where they begin."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors' forms; the tensors aren't held."""
        known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        # Thousands of tensors have few different forms.
        self._forms: Final = [known.setdefault(form, form) for form in map(_form, tensors)]
        lists = {id(form): (list(form[_SHAPE]), [None] * len(form[_SHAPE])) for form in known.values()}
        dims = [lists[id(form)] for form in self._forms]
        self._guards: Final = [
            _make_guards(tensors[start : start + _BLOCK], dims[start : start + _BLOCK])
            for start in range(0, len(tensors), _BLOCK)
        ]
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        # If two begin at one place, they might be tied.
        self._addresses: Final[list[int | None]] = (
            [*addresses] if len(set(addresses)) == len(addresses) else []
        )

    def compare(self, tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
        """Compare as many tensors with these.

        Returns:
            Whether they are ordinary ones of these forms, in order; and if so, whether each begins where the earlier
            one did, and no other does.
        """
        are_there = bool(self._addresses)
        for number, guards in enumerate(self._guards):
            span = slice(number * _BLOCK, (number + 1) * _BLOCK)
            block: list[Any] = list(tensors[span])
            # Of a nested tensor, which has no shape, the guards would end the process.
            if any(map(_attributes, block)) or any(map(_is_nested, block)):
                return False, False
            # The guards also fail for tensors that differ in what doesn't count, such as `requires_grad`.
            if not (guards.check(*block) or _have_forms(block, self._forms[span])):
                return False, False
            are_there = (
                are_there
                and torch._C._tensors_data_ptrs_at_indices_equal(  # noqa: SLF001 — as above: in C
                    block, self._addresses[span], _INDEXES[: len(block)]
                )
            )
        return True, are_there


def _make_guards(
    tensors: Sequence[torch.Tensor], dims: Sequence[tuple[list[int], list[None]]]
) -> TensorGuards:
    """Make the check that torch's compiler does before it runs a compiled function: it compares each tensor in C."""
    sizes, any_strides = zip(*dims, strict=True)
    return TensorGuards(*tensors, dynamic_dims_sizes=list(sizes), dynamic_dims_strides=list(any_strides))


def _have_forms(tensors: Sequence[torch.Tensor], forms: Sequence[object]) -> bool:
    return ORDINARY.issuperset(map(type, tensors)) and all(map(eq, map(_form, tensors), forms))
