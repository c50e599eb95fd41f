"""Write a checkpoint's objects on each rank, finish them on rank 0, and read them back verified."""

from stepkeeper.checkpoint.files import CommitFiles
from stepkeeper.checkpoint.finishing import FinishedCheckpoint, finish_checkpoint, verify_objects
from stepkeeper.checkpoint.layout_cache import LayoutCache
from stepkeeper.checkpoint.manifest import Shardings
from stepkeeper.checkpoint.orders import SaveOrder, Structure, TensorOrder, ValueOrder
from stepkeeper.checkpoint.reading import BlockReader, read_manifests
from stepkeeper.checkpoint.writing import write_checkpoint

__all__ = [
    "BlockReader",
    "CommitFiles",
    "FinishedCheckpoint",
    "LayoutCache",
    "SaveOrder",
    "Shardings",
    "Structure",
    "TensorOrder",
    "ValueOrder",
    "finish_checkpoint",
    "read_manifests",
    "verify_objects",
    "write_checkpoint",
]
