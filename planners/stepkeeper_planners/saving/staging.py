"""Stage a state for `dcp.async_save`: copy it on its own devices, so that training can continue."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters.open_shardings import keep_shardings_open
from stepkeeper_planners.state.filling import rebuild_state
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import flatten_state
from stepkeeper_planners.state.whole import Whole


class SPMDStager(AsyncStager):
    """Copy each tensor on its own devices, with its sharding. Pass a stager to `dcp.async_save`.

    Use it in place of torch's own stagers, which fail on tensors of torch_xla. Tied tensors are copied once, and stay
    tied. The copies take device memory until the save has ended. Where several devices hold the same elements, one copy
    of them is made if that saves enough memory to be worth it.

    Ranks: all ranks stage, each with a stager of its own, as all take part in the save.
    """

    # False, so that `dcp.async_save` doesn't call `synchronize_staging` right after `stage`.
    _synchronize_after_execute = False

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state as it is now. On XLA the copy is dispatched without waiting for it.

        Call it after the training loop's own `torch_xla.sync()`: then it compiles one small program, once.

        Args:
            state_dict: the state to save; nested dicts and lists of tensors, values, Stateful objects,
                PerRank and Whole.

        Returns:
            A state of the same nesting. Its tensors are copies on the same devices, its values deep copies; each
            Stateful is replaced by the result of its state_dict().

        Raises:
            DuplicateNameError: two entries get the same name.
            UnsupportedValueError: a value is of a type that isn't stored.
            UnsupportedShardingError: a tensor's placement doesn't determine which device holds what.
        """
        flat = flatten_state(state_dict)
        copies = self.copies(flat.tensors)
        leaves: dict[str, object] = {fqn: copy.deepcopy(value) for fqn, value in flat.values.items()}
        leaves |= {fqn: Whole(leaves[fqn]) for fqn in flat.wholes}
        for fqn, value in flat.per_rank.items():
            leaves[fqn] = PerRank(copy.deepcopy(value), resize=flat.resizers[fqn])
        leaves |= copies
        leaves |= {name: copies[first] for name, first in flat.aliases.items()}
        return rebuild_state(flat, leaves)

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of the tensors on their own devices, by the same names. Subclasses may copy them elsewhere.

        Args:
            tensors: the tensors by name; each tied tensor once.
        """
        with keep_shardings_open(tensors.values()):
            copies = {fqn: adapters.clone_for_transfer(fqn, tensor) for fqn, tensor in tensors.items()}
            adapters.start_pending(tuple(copies.values()))
        return copies

    @override
    def synchronize_staging(self) -> None:
        """Return at once: a copy that is still running holds the state as it was."""

    @override
    def close(self) -> None:
        """Release nothing: the stager holds no copies."""
