"""The log of a root: who may write, what is committed, where Latest is. One object per slot, put if absent."""

from stepkeeper.log.entries import (
    Begin,
    Commit,
    Delete,
    Entry,
    LegacyBase,
    ManifestRef,
    Owner,
    Quarantine,
    Restored,
    Void,
)
from stepkeeper.log.log import Claim, Log
from stepkeeper.log.state import CommitRecord, LogState

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
