"""Refuse plans that a storage writer can't hold, before it loses a part of them without an error."""

from collections import Counter
from collections.abc import Collection
from typing import Final

from stepkeeper_planners.errors import UnsupportedWriterError
from stepkeeper_planners.saving.assignment import Assignment

__all__ = ["check_safetensors_plan", "is_safetensors_plan"]

_KEYS: Final = {"shard_index", "fqn_to_index_mapping"}
"""The keys that torch's HuggingFaceStorageWriter adds to a plan, by which it is recognized."""


def is_safetensors_plan(storage_data: object) -> bool:
    """Tell whether the plan went through torch's HuggingFaceStorageWriter."""
    return isinstance(storage_data, dict) and not set(storage_data) - _KEYS


def check_safetensors_plan(
    storage_data: Collection[str],
    assignment: Assignment,
    *,
    values: Collection[str],
    partial_names: Collection[str],
) -> None:
    """Check that HuggingFaceStorageWriter can write the whole plan.

    Args:
        storage_data: what the writer added to this rank's plan.
        assignment: the writes of all ranks.
        values: the names of values and of PerRank entries.
        partial_names: the names that only some of the ranks have.

    Raises:
        UnsupportedWriterError: the writer can't; the message names what would be lost, and what to do.
    """
    if partial_names:
        raise UnsupportedWriterError(
            f"HuggingFaceStorageWriter was told of all names, and has none of those that only some ranks have: "
            f"{', '.join(sorted(partial_names)[:5])}. Save with FileSystemWriter, and convert"
        )
    world_size = len(assignment.by_rank)
    if world_size > 1 and "shard_index" not in storage_data:
        raise UnsupportedWriterError(
            f"{world_size} ranks would write one file of HuggingFaceStorageWriter: give it save_distributed=True"
        )
    if values:
        raise UnsupportedWriterError(
            f"safetensors files hold tensors only; leave out of this save: {', '.join(sorted(values))}"
        )
    for rank in range(world_size):
        pieces = Counter(write.fqn for write in assignment.list_writes(rank))
        twice = next((fqn for fqn, n_pieces in pieces.items() if n_pieces > 1), None)
        if twice is not None:
            raise UnsupportedWriterError(
                f"{twice}: rank {rank} writes {pieces[twice]} parts of it, and HuggingFaceStorageWriter keeps one "
                "of a tensor in a file: save with FileSystemWriter, and convert"
            )
