"""What the state of a log doesn't keep, and its objects tell: who began, when, and which data nothing names."""

import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from stepkeeper.cli.render import Leftover
from stepkeeper.cli.terminal import Root
from stepkeeper.errors import LogFormatError
from stepkeeper.log import BeginEntry, CommitEntry, LogState
from stepkeeper.log.tail import LOG_PREFIX, slot_path
from stepkeeper.storage import ObjectStat

__all__ = ["begins_of", "leftovers_of", "time_of", "times_of"]

_THREADS: Final = 16
_FOLDER: Final = re.compile(r"((0|[1-9][0-9]*)/(0|[1-9][0-9]*)-[0-9a-f]{32})/[^/]+")
_SLOT: Final = re.compile(re.escape(LOG_PREFIX) + r"([0-9]{8,})\.json")


def begins_of(root: Root, claims: Collection[int]) -> dict[int, BeginEntry]:
    """What began each of `claims`. Raises LogFormatError, StorageError."""
    with ThreadPoolExecutor(_THREADS) as pool:
        bodies = dict(zip(claims, pool.map(lambda claim: root.log.entry(claim).body, claims), strict=True))
    begins = {claim: body for claim, body in bodies.items() if isinstance(body, BeginEntry)}
    if other := set(bodies) - set(begins):
        raise LogFormatError(f"{root.uri}/{slot_path(min(other))} is taken for a claim, but is no begin")
    return begins


def times_of(root: Root) -> dict[int, float]:
    """When each slot was put, by the store's clock, where it says so."""
    return _times(root.patience.retry(lambda: root.store.list(LOG_PREFIX)))


def time_of(root: Root, slot: int) -> dict[int, float]:
    """As `times_of`, for one slot."""
    return _times(root.patience.retry(lambda: root.store.list(slot_path(slot))))


def _times(listed: Collection[ObjectStat]) -> dict[int, float]:
    named = ((_SLOT.fullmatch(stat.path), stat.time_unix_s) for stat in listed)
    return {int(name[1]): time_unix_s for name, time_unix_s in named if name and time_unix_s is not None}


@dataclass(slots=True)
class _Folder:
    step: int
    claim: int
    size_bytes: int = 0


def leftovers_of(root: Root, state: LogState) -> list[Leftover]:
    """Folders that no commit of `state` names: of deleted commits, of saves that are under way or were given up."""
    named = {record.folder for record in state.commits.values()}
    folders: dict[str, _Folder] = {}
    for stat in root.patience.retry(lambda: root.store.list("")):
        match = _FOLDER.fullmatch(stat.path)
        if match and match[1] not in named:
            folder = folders.setdefault(match[1], _Folder(step=int(match[2]), claim=int(match[3])))
            folder.size_bytes += stat.size_bytes
    slots = _slots_of(root, folders, state) if folders else {}
    # The listing is younger than the state: what was committed since is no leftover.
    since = {record.folder for record in root.log.refresh().commits.values()} if folders else set()
    return [
        Leftover(
            folder=name,
            step=folder.step,
            claim=folder.claim,
            size_bytes=folder.size_bytes,
            slot=slots.get(name),
        )
        for name, folder in sorted(folders.items())
        if name not in since
    ]


def _slots_of(root: Root, folders: dict[str, _Folder], state: LogState) -> dict[str, int]:
    """Of the folders that once were commits, their slots: read from the log, from the oldest of their claims on."""
    first = min(folder.claim for folder in folders.values()) + 1
    with ThreadPoolExecutor(_THREADS) as pool:
        slots = range(first, state.tail + 1)
        bodies = pool.map(lambda slot: root.log.entry(slot).body, slots)
        return {
            body.folder: slot
            for slot, body in zip(slots, bodies, strict=True)
            if isinstance(body, CommitEntry) and body.folder in folders
        }
