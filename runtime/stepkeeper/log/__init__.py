"""The log of a root: who may write, what is committed, where Latest is. One object per slot, put if absent."""

from stepkeeper.log.claims import Claim
from stepkeeper.log.entries import Begin, Commit, Delete, Entry, Quarantine, Restored, Void
from stepkeeper.log.log import Log
from stepkeeper.log.records import CommitRecord, LegacyBase, ManifestRef, Owner
from stepkeeper.log.state import LogState

__all__ = [
    "Begin",
    "Claim",
    "Commit",
    "CommitRecord",
    "Delete",
    "Entry",
    "LegacyBase",
    "Log",
    "LogState",
    "ManifestRef",
    "Owner",
    "Quarantine",
    "Restored",
    "Void",
]
