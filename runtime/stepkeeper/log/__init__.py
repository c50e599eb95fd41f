"""Keep the log of a root: who may write, what is committed, where Latest is.

It has one object per slot, put if absent.
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
