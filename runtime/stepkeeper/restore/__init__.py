"""Restore checkpoints: the ranks agree on a commit, and each reads what it needs of it. Every block is verified."""

from stepkeeper.restore.describe import describe_step
from stepkeeper.restore.latest import LatestRestore
from stepkeeper.restore.listing import list_steps, record_uri
from stepkeeper.restore.restorer import Restorer
from stepkeeper.restore.step import restore_step
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
