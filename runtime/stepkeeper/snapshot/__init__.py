"""A copy of the state as it is after one step, in memory that the companion process can read."""

from stepkeeper.snapshot.device import run_pending
from stepkeeper.snapshot.region import Region
from stepkeeper.snapshot.take import Snapshot, Snapshots

__all__ = ["Region", "Snapshot", "Snapshots", "run_pending"]
