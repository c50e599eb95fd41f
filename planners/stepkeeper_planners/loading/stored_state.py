"""Describe a checkpoint's content, from its metadata."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from typing_extensions import override

from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.flat_names import find_flat_names
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.state.per_rank import parse_stored_name
from stepkeeper_planners.state.tree import Path

__all__ = ["StoredState", "StoredTensor", "collect_stored_state", "read_key_paths"]


class StoredTensor(NamedTuple):
    """A tensor in a checkpoint, and the boxes of its chunks."""

    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    data: object = None
    """Identifies the bytes: names with equal data were one tensor, all others were not. None if unknown."""
    place: object = None
    """Identifies where the bytes lie: names with an equal place were one tensor, others may be. None if unknown."""

    def differs_from(self, other: "StoredTensor") -> bool:
        """Return whether these are certainly two tensors. With unknown data they may be one that was stored twice."""
        if (self.global_shape, self.dtype) != (other.global_shape, other.dtype):
            return True
        return self.data is not None and other.data is not None and self.data != other.data

    def is_same_as(self, other: "StoredTensor") -> bool:
        """Return whether these are certainly one tensor that was stored once."""
        return (self.data is not None and self.data == other.data) or (
            self.place is not None and self.place == other.place
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """Everything that a checkpoint has, by stored name."""

    tensors: Mapping[str, StoredTensor]
    values: Collection[str] = ()
    further: Mapping[str, str] = field(default_factory=dict)
    """The names that only repeat an option of an optimizer's group, with that option's name: see flat_names.py."""
    read_paths: Callable[[], Mapping[str, Path]] = dict
    """Returns the keys that led to each name when it was saved, and the marks of `encode_nesting`; empty if unknown."""

    def saved_world_sizes(self) -> dict[str, dict[int, set[int]]]:
        """Return, for each `PerRank` name, the world sizes that saved it, and which ranks' values each has."""
        world_sizes: dict[str, dict[int, set[int]]] = {}
        for name in self.values:
            parsed = parse_stored_name(name)
            if parsed is not None:
                fqn, rank, world_size = parsed
                world_sizes.setdefault(fqn, {}).setdefault(world_size, set()).add(rank)
        return world_sizes


def collect_stored_state(metadata: Metadata) -> StoredState:
    """Describe all tensors and values of the checkpoint."""
    entries = metadata.state_dict_metadata
    tensors = {fqn: entry for fqn, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    places = metadata.storage_data if isinstance(metadata.storage_data, Mapping) else {}
    return StoredState(
        tensors=_StoredTensors(tensors, places),
        values=[fqn for fqn in entries if fqn not in tensors],
        further=find_flat_names(metadata.planner_data, entries),
        read_paths=lambda: read_key_paths(metadata),
    )


def read_key_paths(metadata: Metadata) -> dict[str, Path]:
    """Return the keys that led to each name when it was saved; none if the writer stored none."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    # Another writer's planner data may hold anything.
    return {name: path for name, path in paths.items() if isinstance(name, str) and isinstance(path, tuple)}


class _StoredTensors(Mapping[str, StoredTensor]):
    """The checkpoint's tensors. Their boxes are made when a tensor is first looked up."""

    def __init__(
        self, tensors: dict[str, TensorStorageMetadata], places: Mapping[MetadataIndex, Any]
    ) -> None:
        self._tensors, self._places = tensors, places
        self._known: dict[str, StoredTensor] = {}

    @override
    def __getitem__(self, fqn: str) -> StoredTensor:
        if fqn not in self._known:
            stored = self._tensors[fqn]
            boxes = tuple(Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in stored.chunks)
            places = [self._places.get(MetadataIndex(fqn, chunk.offsets)) for chunk in stored.chunks]
            self._known[fqn] = StoredTensor(
                dtype=dtype_name(stored.properties.dtype),
                global_shape=tuple(stored.size),
                boxes=boxes,
                place=None if None in places else tuple(zip(boxes, places, strict=True)),
            )
        return self._known[fqn]

    @override
    def __contains__(self, fqn: object) -> bool:
        return fqn in self._tensors

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @override
    def __len__(self) -> int:
        return len(self._tensors)
