"""Checkpoints that another writer left in a root: stock torch.distributed.checkpoint's and torch_xla's. Torch-free."""

from stepkeeper.legacy.finding import LegacyRecord, LegacyStep, below, find_steps, found_in, unnamed_in
from stepkeeper.log import CommitRecord

__all__ = ["LegacyRecord", "LegacyStep", "Restorable", "below", "find_steps", "found_in", "unnamed_in"]

Restorable = CommitRecord | LegacyRecord
"""What a state can be restored from."""
