"""Copy tensors of the host, and of accelerators that torch itself copies from, into a region.

For such states, the train loop waits mostly for this.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from stepkeeper.save.snapshot.plan import SnapshotPlan
from stepkeeper.save.snapshot.region import Region
from stepkeeper_planners import adapters
from stepkeeper_planners.state.tree import order_tensors

__all__ = ["copy_host_tensors", "copy_tensors"]

_SHARED_ELEMENTS: Final = 32 * 1024
"""The number of elements from which torch itself divides a copy among its threads."""

_LEAST_COPIES: Final = 256
"""Copies for which one further thread pays off."""

_MOST_THREADS: Final = 8
"""A few threads already use all of the memory's bandwidth."""


@torch.no_grad()
def copy_host_tensors(tensors: Mapping[str, torch.Tensor], plan: SnapshotPlan, region: Region) -> None:
    """Copy this rank's part of all tensors that are not copied on devices into the region."""
    places = region.view_orders(plan.orders)
    sources = list(plan.pick_whole(order_tensors(tensors)))
    destinations = [places[index] for index in plan.whole_tensors.values()]
    for fqn, mine in plan.partial_writes.items():
        memory = adapters.local_memory(tensors[fqn])
        # Without one memory for all of this rank's part, it has shards.
        shards = [memory] if memory is not None else adapters.local_shards(tensors[fqn])
        for index, write in mine:
            shard = shards[write.local_index]
            part = shard if places[index].shape == shard.shape else shard[write.shard_box.slices]
            if not shard.is_cpu:
                # Directly to its place: a copy of the state on the host would take as much memory again.
                places[index].copy_(part)
                continue
            sources.append(part)
            destinations.append(places[index])
    # torch divides each large copy among its threads. The others are divided here, each copied by one thread.
    large = [index for index, place in enumerate(destinations) if place.numel() >= _SHARED_ELEMENTS]
    if large:
        copy_tensors([destinations[index] for index in large], [sources[index] for index in large])
    if len(large) == len(destinations):
        return
    if large:
        left = sorted(set(range(len(destinations))).difference(large))
        destinations, sources = [destinations[index] for index in left], [sources[index] for index in left]
    _copy_by_threads(destinations, sources)


def _copy_by_threads(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    n_threads = min(
        _MOST_THREADS,
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)),
        1 + len(sources) // _LEAST_COPIES,
    )
    if n_threads == 1:
        copy_tensors(destinations, sources)
        return
    with ThreadPoolExecutor(n_threads - 1, thread_name_prefix="stepkeeper-copy") as pool:
        shares = [
            pool.submit(copy_tensors, destinations[k::n_threads], sources[k::n_threads])
            for k in range(1, n_threads)
        ]
        copy_tensors(destinations[::n_threads], sources[::n_threads])
        for share in shares:
            share.result()


def copy_tensors(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy the elements of each source to its destination."""
    if not destinations:  # torch needs at least one
        return
    with torch.no_grad():  # a setting of each thread
        # As in torch's optimizers: thousands in one call, without the GIL.
        torch._foreach_copy_(destinations, sources)
