"""Restore checkpoints: the ranks agree on a commit, and each reads what it needs of it. Every block is verified."""

from stepkeeper.restore.latest import LatestRestore, restore_step
from stepkeeper.restore.listing import describe_step, list_steps, record_uri
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.verify import verify_step

__all__ = [
    "LatestRestore",
    "Restorer",
    "describe_step",
    "list_steps",
    "record_uri",
    "restore_step",
    "verify_step",
]
