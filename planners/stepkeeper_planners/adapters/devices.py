"""Map devices to ranks: which rank holds a device's shard, and at which local index. Pure."""

from collections.abc import Sequence

from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.layout import Owner, Ranks


def device_owners(
    local: Sequence[int], everywhere: Sequence[int], process_count: int, ranks: Ranks
) -> dict[int, tuple[Owner, ...]]:
    """Return, for each device of the program, the copies of its shard.

    With one process in the program, each rank runs the whole program on devices of its own, numbered alike; they are
    copies of one another. With several, the ranks are the program's processes, each with its share of the devices, in
    order.

    Args:
        local: the numbers of this process's devices.
        everywhere: the numbers of all devices of the program.
        process_count: the number of processes that run the program.
        ranks: this process among those that save or load.

    Raises:
        UnsupportedShardingError: the devices and ranks fit neither case.
    """
    if process_count == 1:
        return {
            device: tuple(Owner(rank=rank, local_index=index) for rank in range(ranks.world_size))
            for index, device in enumerate(local)
        }
    share = len(everywhere) // process_count
    if process_count != ranks.world_size or list(local) != list(everywhere[ranks.rank * share :][:share]):
        raise UnsupportedShardingError(
            f"rank {ranks.rank} of {ranks.world_size} has devices {list(local)} of {list(everywhere)} in a program of "
            f"{process_count} processes; needed is one rank for each process, in the order of the devices"
        )
    return {
        device: (Owner(rank=position // share, local_index=position % share),)
        for position, device in enumerate(everywhere)
    }
