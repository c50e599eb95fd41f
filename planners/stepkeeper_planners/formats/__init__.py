"""Convert files of other kinds to checkpoints, and checkpoints to such files, in the memory of one tensor."""

from stepkeeper_planners.formats.checkpoint_files import CheckpointFiles
from stepkeeper_planners.formats.reporting import Conversion, Progress
from stepkeeper_planners.formats.safetensors.conversion import (
    checkpoint_to_safetensors,
    safetensors_to_checkpoint,
)
from stepkeeper_planners.formats.torch_save.conversion import (
    checkpoint_to_torch_save,
    torch_save_to_checkpoint,
)
from stepkeeper_planners.formats.torch_save.reader import TorchSaveReader

__all__ = [
    "CheckpointFiles",
    "Conversion",
    "Progress",
    "TorchSaveReader",
    "checkpoint_to_safetensors",
    "checkpoint_to_torch_save",
    "safetensors_to_checkpoint",
    "torch_save_to_checkpoint",
]
