"""A copy of the state as it is after one step, in memory that the companion process can read."""

from stepkeeper.snapshot.region import Region
from stepkeeper.snapshot.take import Snapshot, take_snapshot

__all__ = ["Region", "Snapshot", "take_snapshot"]
