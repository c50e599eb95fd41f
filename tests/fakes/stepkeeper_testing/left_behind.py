"""Read what the processes of a training have left in a folder: the newest commit, and their last words."""

from pathlib import Path

from stepkeeper.contract import Termination
from stepkeeper.log import CommitRecord, Log
from stepkeeper.storage import open_store


def head_of(folder: Path) -> CommitRecord:
    head = Log(open_store((folder / "root").as_uri())).open().latest
    assert head is not None
    return head


def last_word(folder: Path, rank: int | None = None) -> Termination:
    """Return the last word of a pod, or of the rank that shares its file with no other."""
    return Termination.from_json((folder / f"termination{'' if rank is None else f'.{rank}'}").read_bytes())
