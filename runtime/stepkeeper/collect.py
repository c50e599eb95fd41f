"""Deletion: first the log says it, then data goes. Nothing that isn't a save's folder of ours is ever touched."""

import re
from collections.abc import Collection
from functools import partial
from typing import Final

from stepkeeper.contract import Retention
from stepkeeper.log import Claim, CommitRecord, Log, LogState
from stepkeeper.manifest import is_object_name
from stepkeeper.retention import deletable
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["collect_garbage", "delete_superseded", "garbage_folders"]

_PATH: Final = re.compile(r"((?:0|[1-9][0-9]*)/(0|[1-9][0-9]*)-[0-9a-f]{32})/([^/]+)")


def delete_superseded(
    log: Log,
    store: Store,
    claim: Claim,
    retention: Retention,
    verified: Collection[int] = (),
    *,
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[CommitRecord, ...]:
    """The commits that `retention` doesn't keep are deleted: in the log, then their data. Answers them.

    Where it is cut short after the entry, the data is garbage of this claim, for a later claim to collect.
    """
    deleted = log.delete(claim, lambda state: deletable(state, retention, verified))
    for record in deleted:
        _delete_folder(store, record.folder, patience)
    return deleted


def collect_garbage(
    log: Log, store: Store, claim: Claim, *, patience: Patience = DEFAULT_PATIENCE
) -> tuple[str, ...]:
    """Folders of saves of earlier claims that no commit names are gone. Answers them.

    An earlier claim can commit nothing any more: what of its saves isn't in the log by now, never will be.
    """
    listed = patience.retry(lambda: store.list(""))
    folders = garbage_folders(log.state, claim.slot, [stat.path for stat in listed])
    for folder in folders:
        _delete_folder(store, folder, patience)
    return folders


def garbage_folders(state: LogState, claim: int, paths: Collection[str]) -> tuple[str, ...]:
    """Of all objects' `paths`, the folders that claim `claim` may collect: there is something of ours in them. Pure."""
    named = {record.folder for record in state.commits.values()}
    matches = [match for match in map(_PATH.fullmatch, paths) if match and is_object_name(match[3])]
    return tuple(sorted({m[1] for m in matches if int(m[2]) < claim and m[1] not in named}))


def _delete_folder(store: Store, folder: str, patience: Patience) -> None:
    """What a save put there is gone. A file that somebody else put beside it stays, and so does the folder then."""
    for stat in patience.retry(lambda: store.list(f"{folder}/")):
        if is_object_name(stat.path.removeprefix(f"{folder}/")):
            patience.retry(partial(store.delete, stat.path))
