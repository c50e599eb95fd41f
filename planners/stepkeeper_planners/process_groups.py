"""Find the processes that save and load together, and exchange objects between them."""

import torch.distributed as dist

from stepkeeper_planners.geometry.layout import Ranks, ranks_in_group

__all__ = ["all_gather_object", "broadcast_object", "current_ranks", "single_rank"]


def current_ranks(group: dist.ProcessGroup | None) -> Ranks:
    """Return this process's rank in the group, or in the default group; rank 0 of 1 if there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(rank=0, world_size=1)
    return ranks_in_group(dist.get_rank(group), dist.get_process_group_ranks(group))


def single_rank() -> Ranks:
    """Return this process as rank 0 of 1, even if there are other processes."""
    initialized = dist.is_available() and dist.is_initialized()
    return ranks_in_group(0, [dist.get_rank() if initialized else 0])


def broadcast_object(rank: int, value: object, group: dist.ProcessGroup | None) -> object:
    """Return the `value` that this rank passed. All ranks of the group call this with the same `rank`."""
    holder = [value]
    dist.broadcast_object_list(holder, group_src=rank, group=group)
    return holder[0]


def all_gather_object(value: object, group: dist.ProcessGroup | None) -> list[object]:
    """Return the `value` of each rank of the group, by rank. All of them call this."""
    values: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
