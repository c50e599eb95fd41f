"""What `dcp.async_save` saves from: a copy of the state that training doesn't change, made where the tensors are."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.state.filling import rebuild_state
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import flatten_state


class SPMDStager(AsyncStager):
    """Copies each tensor on its own devices, with its placement; tied ones once. Pass one to `dcp.async_save`.

    torch's own stagers take tensors of torch_xla for something else, and fail. The copies need free device memory
    until the save has ended. Of what several devices hold alike only one copy is made, where that is worth it.
    """

    _synchronize_after_execute = False

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state as it is now. On XLA the copying was dispatched, and is not waited for.

        Called after the loop's own `torch_xla.sync()` it compiles one small program, once.

        Raises:
            DuplicateNameError: two entries get the same name.
            UnsupportedValueError: a value is of a type that isn't stored.
            UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
        """
        flat = flatten_state(state_dict)
        copies = self.copies(flat.tensors)
        leaves: dict[str, object] = {fqn: copy.deepcopy(value) for fqn, value in flat.values.items()}
        for fqn, value in flat.per_rank.items():
            leaves[fqn] = PerRank(copy.deepcopy(value), resize=flat.resizers[fqn])
        leaves |= copies
        leaves |= {name: copies[first] for name, first in flat.aliases.items()}
        return rebuild_state(flat, leaves)

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the tensors by the same names, made where they are. For subclasses to make them elsewhere."""
        copies = {fqn: adapters.clone_for_transfer(fqn, tensor) for fqn, tensor in tensors.items()}
        adapters.start_pending(tuple(copies.values()))
        return copies

    @override
    def synchronize_staging(self) -> None:
        """Nothing: a copy that is still under way is of the state as it was."""
        return

    @override
    def close(self) -> None:
        """Nothing is held but what is being saved."""
        return
