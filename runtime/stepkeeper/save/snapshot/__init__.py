"""Copy the state after one step into memory that the companion process can read."""

from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot, SnapshotTaker
from stepkeeper.save.snapshot.transfer import await_transfer, transfer_snapshot

__all__ = ["Region", "Snapshot", "SnapshotTaker", "await_transfer", "transfer_snapshot"]
