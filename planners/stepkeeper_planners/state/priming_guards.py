"""Keep the step of an optimizer's copy away from the training's own objects."""

import gc
import random
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import SGD, Optimizer, optimizer

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters import random_numbers
from stepkeeper_planners.errors import PrimeError

__all__ = [
    "check_complete",
    "check_dense",
    "check_unchanged",
    "check_unreachable",
    "global_hooks_off",
    "keep_random_state",
    "versions",
]


@contextmanager
def global_hooks_off() -> Iterator[None]:
    """Remove the hooks for steps of all optimizers; put them back afterwards."""
    tables: list[dict[int, Any]] = [
        optimizer._global_optimizer_pre_hooks,  # noqa: SLF001 — torch has no other way to them
        optimizer._global_optimizer_post_hooks,  # noqa: SLF001 — torch has no other way to them
    ]
    kept = [dict(table) for table in tables]
    # The handles that remove a hook know these tables, so they stay the same objects.
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the states of all random number generators afterwards."""
    python = random.getstate()
    # Another module's random numbers may be in use only if it was imported.
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    xla = sys.modules["torch_xla"].core.xla_model if "torch_xla" in sys.modules else None
    seed = xla.get_rng_state() if xla is not None else None
    accelerator = random_numbers.read_accelerator()
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            random.setstate(python)
            if accelerator is not None:
                random_numbers.set_accelerator(accelerator)
            if numpy is not None:
                sys.modules["numpy"].random.set_state(numpy)
            if xla is not None:
                xla.set_rng_state(seed)


def check_unreachable(stand_in: Optimizer, forbidden: Collection[object]) -> None:
    """Check that no attribute of the copy leads to one of the training's own objects, as a lambda over self would.

    Only this check finds writes to the parameters' `.data`, which many optimizers do in a step, and finds them before
    they are done: torch doesn't count such writes, so `check_unchanged` misses them. They come from objects that
    deepcopy leaves as they are: a function over the parameters that clips them after the step, or a bucket that holds
    them beside a process group or a lock.

    Raises:
        PrimeError: an attribute does; the message names it.
    """
    ids = {id(each) for each in forbidden}
    seen: set[int] = set()
    for name, value in vars(stand_in).items():
        if any(id(each) in ids for each in _reachable(value, seen)):
            raise PrimeError(
                f"prime_optimizer: {type(stand_in).__name__}.{name} can't be copied and leads to the optimizer or its "
                "parameters, which a step of the copy would change through it. Load into the state that a real step "
                "leaves"
            )


def _reachable(root: object, seen: set[int]) -> Iterator[object]:
    """Yield each reachable object that wasn't seen. Don't follow tensors, classes, modules and functions' globals."""
    pending = [root]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, torch.Tensor | type | ModuleType):
            continue
        if type(each) is FunctionType:
            cells = each.__closure__ or ()
            pending += [*cells, *(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
            pending.append(vars(each))
        else:
            pending += gc.get_referents(each)


def versions(parameters: Sequence[torch.Tensor]) -> list[object]:
    """Return versions that differ once a parameter is changed in place; on XLA, once it gets other data."""
    return [(p._version, adapters.identity(p) if p.device.type == "xla" else None) for p in parameters]  # noqa: SLF001 — torch has no other count of changes in place


def check_unchanged(stand_ins: dict[torch.Tensor, Any], before: list[object]) -> None:
    """Check that the step of the copy changed no parameter of the training, not even through a global name.

    Raises:
        PrimeError: it did. The parameters have been set back to the values of their stand-ins, which that step didn't
            use.
    """
    changed = [p for p, was, now in zip(stand_ins, before, versions([*stand_ins]), strict=True) if was != now]
    for parameter in changed:
        parameter.detach().copy_(stand_ins[parameter])
    if changed:
        raise PrimeError(
            f"prime_optimizer: the step of a copy of the optimizer changed {len(changed)} parameters of the training, "
            "which it doesn't get from the copy. They were set back. Load into the state that a real step leaves"
        )


def check_complete(real: Optimizer, primed: Collection[object]) -> None:
    """Check that every trained parameter has state, unless this optimizer is known to keep none for it.

    Raises:
        PrimeError: some parameters have none.
    """
    needed = [
        parameter
        for group in real.param_groups
        if not isinstance(real, SGD) or group["momentum"]
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    ids = {id(each) for each in primed}
    n_without = sum(id(parameter) not in ids for parameter in needed)
    if n_without:
        raise PrimeError(
            f"prime_optimizer: {type(real).__name__}.step() made no state for {n_without} of {len(needed)} parameters "
            "with gradients of zeros. If it never makes any, don't prime it; else load into the state that a real "
            "step leaves"
        )


def check_dense(made: Sequence[tuple[Optimizer, object]]) -> None:
    """Check that these parameters' gradients are dense, like the zeros that made their state, as far as can be told.

    Raises:
        PrimeError: the gradient of one is sparse, or it is the weight of an embedding with sparse gradients.
    """
    # This walks all objects, so only for SGD, which takes sparse gradients and makes its state in a step.
    sparse = _sparse_weights() if any(isinstance(real, SGD) for real, _ in made) else set()
    for real, parameter in made:
        gradient = getattr(parameter, "grad", None)
        if id(parameter) in sparse or (gradient is not None and gradient.layout is not torch.strided):
            raise PrimeError(
                f"prime_optimizer: a parameter of shape {tuple(getattr(parameter, 'shape', ()))} has sparse gradients, "
                f"and {type(real).__name__} may make other state of them than of dense ones. Load into the state that "
                "a real step leaves, or make the embedding with sparse=False"
            )


def _sparse_weights() -> set[int]:
    """Return the ids of all embedding weights whose gradients will be sparse. A parameter itself doesn't tell."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    # By type(): isinstance() would ask lazily imported modules among all objects for their class.
    embeddings = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return {id(each.weight) for each in embeddings if getattr(each, "sparse", False)}
