"""Give an optimizer the state that a load fills, without a training step.

Optimizers make their state in their first step, and a load fills only what is there.
"""

from collections.abc import Collection
from typing import TypeVar

import torch
from torch.optim import Optimizer

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters.open_shardings import note_inferred, shardings_left_open
from stepkeeper_planners.errors import PrimeError
from stepkeeper_planners.state.priming_copies import (
    Pair,
    copy_with_stand_ins,
    is_of_torch,
    take_step,
    with_those_inside,
    zero_weight_decay,
)
from stepkeeper_planners.state.priming_guards import (
    check_unchanged,
    check_unreachable,
    global_hooks_off,
    keep_random_state,
    versions,
)
from stepkeeper_planners.state.priming_results import (
    MadeState,
    check_copies,
    check_made,
    collect_made_state,
    list_tensors,
)

__all__ = ["prime_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer")


def prime_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Give an optimizer the state that its first step makes, without taking a step of the training.

    Every parameter that requires a gradient gets its state: tensors of the shapes, dtypes and devices that a step
    gives them, and step counts of 0. A copy of the optimizer takes that step, with copies of the parameters (zeros
    for torch's own optimizers, which keep none), gradients of zeros and no weight decay. So state that keeps a copy
    of the parameter, as master weights do, is that copy.

    Nothing else changes: not the parameters, their gradients and shardings, the hyperparameters, state that was
    there before, random numbers, hooks or schedules. A wrapper that has the optimizer that it wraps as `.optimizer`
    is primed with it.

    On XLA, state that the optimizer's step marks with a sharding keeps it, as in ZeRO. State that the step itself
    replicates stays so, as without priming: torch_xla does that to data from the host that the step only reads or
    copies, and to all that a program makes that the step runs by itself (`.cpu()`, `torch_xla.sync()`). Other state of
    a parameter's shape has that parameter's sharding. Where a parameter has none yet, its state has none either: XLA
    chooses both in the first step, as without priming. A parameter that is marked as replicated gets replicated state,
    which XLA may shard in an unprimed first step. Hooks that mark state do so in the first step, over what priming
    gave it.

    Without a load, training goes on as if this hadn't been called, with two exceptions:

    - On XLA an unprimed first step is a program of its own: the zeros of the new state are compiled into it. A primed
      one reads them, as all later steps do. With torch's own optimizers and a sharding on every parameter it is the
      very program of the later steps; without a sharding on every parameter, the second step is. XLA may round the
      two programs differently, so the first step's results may differ in the last bits from an unprimed optimizer's.
    - SGD with dampening doesn't dampen the first gradient, and now takes it for a later one.

    Args:
        optimizer: a torch.optim.Optimizer, or an object that has one as `.optimizer`.

    Returns:
        The same object.

    Ranks: all call it, as all take a step.

    Raises:
        PrimeError: it is no optimizer, its step needs a closure or takes a found_inf, the step failed, it made no state
            for a parameter, state that is neither constant nor a copy of the parameter, or state for sparse gradients,
            or it reaches the parameters past the copy. Nothing was changed.
    """
    if not isinstance(optimizer, Optimizer):
        wrapped = getattr(optimizer, "optimizer", None)
        if wrapped is None:
            raise PrimeError(
                f"prime_optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer, and has none as .optimizer"
            )
        prime_optimizer(wrapped)
        return optimizer
    for made in _make_state(optimizer):
        made.optimizer.state[made.owner] = made.entry
    return optimizer


def _make_state(optimizer: Optimizer) -> list[MadeState]:
    """Return the state that a step of a copy makes, and leave all that the training has as it was.

    Raises:
        PrimeError: see `prime_optimizer`.
    """
    optimizers = with_those_inside(optimizer)
    there = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    there += [
        tensor
        for each in optimizers
        for values in (*each.state.values(), vars(each))
        for tensor in list_tensors(values)
    ]
    kept = shardings_left_open(there)
    with keep_random_state(), global_hooks_off(), torch.no_grad(), kept as left_open:
        pairs, stand_ins = copy_with_stand_ins(optimizer, left_open)
        made = _take_guarded_step(pairs, stand_ins, left_open)
        check_made(made, pairs)
        adapters.start_pending([tensor for each in made for tensor in list_tensors(each.entry)])
        check_copies(made)
        adapters.clear_sharding(
            [tensor for each in made if id(each.owner) in left_open for tensor in each.inferred]
        )
        note_inferred(tensor for each in made for tensor in each.inferred)
    return made


def _take_guarded_step(
    pairs: list[Pair], stand_ins: dict[torch.Tensor, torch.Tensor], left_open: Collection[int]
) -> list[MadeState]:
    """Take the step of the outermost optimizer's copy, without weight decay, and return the state that it made.

    Raises:
        PrimeError: the step failed, or reached the parameters past the copy.
    """
    for _, stand_in in pairs:
        check_unreachable(stand_in, [*stand_ins, *(real for real, _ in pairs)])
        zero_weight_decay(vars(stand_in), *stand_in.param_groups)
    before = versions([*stand_ins])
    originals = {id(stand_in): parameter for parameter, stand_in in stand_ins.items()}
    try:
        take_step(pairs[0][1])
        made = [each for pair in pairs for each in collect_made_state(pair, originals, left_open)]
    finally:
        if not all(is_of_torch(real) for real, _ in pairs):
            check_unchanged(stand_ins, before)
            # What is left pending on copies of the parameters would get into the training's next program.
            adapters.start_pending([*stand_ins.values()])
    return made
