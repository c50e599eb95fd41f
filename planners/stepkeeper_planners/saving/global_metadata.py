"""Build a checkpoint's metadata, and detect writes that the storage writer lost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.errors import LostWritesError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import TensorLayout
from stepkeeper_planners.pickles.dcp_metadata import list_indices

__all__ = ["GlobalMetadata", "build_tensor_metadata"]


@dataclass
class GlobalMetadata(Metadata):
    """The metadata that the coordinator hands to the storage writer; it checks the writer's results.

    When the writer sets `storage_data`, each write that was planned must be in it. An entry that only repeats another,
    under another name, gets the same storage data. After that the object is a plain `Metadata` of torch's.

    Torch's writers with `thread_count` above 1 lose the data of a failing thread, without raising:
    https://github.com/pytorch/pytorch/issues/191391.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied tensors, and further names (see flat_names.py) → the name under which each is written."""

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name != "storage_data" or not isinstance(value, Mapping):
            super().__setattr__(name, value)
            return
        super().__setattr__(name, self._check_written(value))
        # The writer pickles this object next. Readers must find torch's own class in the pickle.
        del self.aliases
        self.__class__ = Metadata  # type: ignore[assignment] # the base has all that is left

    def _check_written(self, written: Mapping[MetadataIndex, object]) -> dict[MetadataIndex, object]:
        """Return `written` with the entries of `aliases`. Raises LostWritesError if a planned write is not in it."""
        complete = dict(written)
        lost: list[MetadataIndex] = []
        for fqn, stored in self.state_dict_metadata.items():
            source = self.aliases.get(fqn, fqn)
            for index in list_indices(source, stored):
                if index not in written:
                    lost.append(index)
                elif source != fqn:
                    complete[MetadataIndex(fqn, index.offset)] = written[index]
        if lost:
            raise LostWritesError(
                f"the storage writer reported success, but {len(lost)} pieces were not written, the first of them "
                f"{lost[0].fqn} at {lost[0].offset and tuple(lost[0].offset)}. One of its threads failed: save with "
                "thread_count=1 to see why. The checkpoint has no .metadata and must not be used"
            )
        return complete


def build_tensor_metadata(layout: TensorLayout, boxes: Iterable[Box]) -> TensorStorageMetadata:
    """Build the metadata of a tensor that is stored in these boxes."""
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in boxes
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(layout.dtype)),
        size=torch.Size(layout.global_shape),
        chunks=chunks,
    )
