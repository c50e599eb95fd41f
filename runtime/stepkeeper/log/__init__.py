"""The log of a root: which process may write, what is committed, and which commit is the latest.

Each slot is one object, put if absent.
"""

from stepkeeper.log.claims import Claim
from stepkeeper.log.entries import (
    BeginEntry,
    CommitEntry,
    DeleteEntry,
    Entry,
    QuarantineEntry,
    RestoredEntry,
    VoidEntry,
)
from stepkeeper.log.log import Log
from stepkeeper.log.records import CommitRecord, ForeignBase, ManifestRef, Owner
from stepkeeper.log.state import LogState

__all__ = [
    "BeginEntry",
    "Claim",
    "CommitEntry",
    "CommitRecord",
    "DeleteEntry",
    "Entry",
    "ForeignBase",
    "Log",
    "LogState",
    "ManifestRef",
    "Owner",
    "QuarantineEntry",
    "RestoredEntry",
    "VoidEntry",
]
