"""Delete the data that the log has deleted or never had, unless it is pinned. Other writers' data isn't touched.

A proof is a test of the store that puts objects: see `storage.exclusive_create`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.manifest import claim_of, is_object_name, sizes_by_folder
from stepkeeper.errors import DamagedEntryError, MissingObjectError
from stepkeeper.log import CommitEntry, Entry, Log, LogState
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.log.tail import read_entry
from stepkeeper.retention.leases import HeldSlots, IsOver, drop_over, leases_by
from stepkeeper.retention.pins import PIN_PREFIX
from stepkeeper.storage.base import PROBE_PREFIX, ObjectStat, Store, StreamedStore
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["Garbage", "GcReport", "collect", "gc", "sweep"]

_PROBE: Final = re.compile(re.escape(PROBE_PREFIX) + r"(?:create-)?([0-9]{8,})-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A folder that no commit of the log needs."""

    folder: str
    slot: int | None = None
    """The slot of the commit that it was, if that is known."""

    n_objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """The result of a collection."""

    collected: tuple[Garbage, ...] = ()
    """Garbage that was deleted; in a dry run, that would be."""

    pinned: tuple[Garbage, ...] = ()
    """Garbage that is kept until a collection after its pins are removed."""

    over: tuple[str, ...] = ()
    """Paths of pins that were removed because their lease is over; in a dry run, that would be."""

    remnants: tuple[str, ...] = ()
    """Paths of objects that killed processes left of the store's proofs. They were deleted; in a dry run, would be."""


def sweep(
    store: Store,
    garbage: Iterable[Garbage],
    *,
    is_over: IsOver = lambda _: False,
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[Garbage, ...]:
    """Delete the data of commits that the log has deleted, and return those that are kept because of a pin.

    The log must have deleted them before the call. A process that pins a commit reads the log afterwards, and
    so notices if the pin was too late. Pins whose lease is over are removed first.
    """
    doomed = tuple(garbage)  # iterated more than once
    if not doomed:
        return ()
    pinned = drop_over(store, is_over, patience=patience).slots
    folders = _folders_of(lambda slot: patience.retry(partial(read_entry, store, slot)), pinned, doomed)
    left = tuple(each for each in doomed if each.slot in pinned or each.folder in folders)
    for each in doomed:
        if each not in left:
            _delete_folder(store, each.folder, patience)
    return left


def gc(log: Log, store: Store, *, dry_run: bool = False, patience: Patience = DEFAULT_PATIENCE) -> GcReport:
    """Delete the folders of saves of earlier claims that no commit names, except for those with a pin.

    Delete also the objects that killed processes have left of their proofs, if no later proof can need them.

    An earlier claim can no longer commit: a save of it that isn't in the log by now never will be. So any process
    that may delete objects may call this, with or without a claim, also while another process saves.
    """
    state = log.refresh()
    return collect(
        state,
        log.entry,
        store,
        is_over=leases_by(StoreTimes(store, patience=patience), state.tail),
        dry_run=dry_run,
        patience=patience,
    )


def collect(
    state: LogState,
    entry: Callable[[int], Entry],
    store: Store,
    *,
    is_over: IsOver = lambda _: False,
    dry_run: bool = False,
    patience: Patience = DEFAULT_PATIENCE,
) -> GcReport:
    """Collect as `gc` does, by the state that the log had at some time after its last begin.

    The log may be appended to meanwhile: garbage stays garbage. `entry` reads an entry.
    """
    if state.claim is None:
        return GcReport()
    listed = patience.retry(lambda: store.list(""))
    found = _garbage(state, state.claim, listed)
    held = HeldSlots(slots=frozenset())
    # Without garbage and without pins, no further listing is needed.
    if found or any(stat.path.startswith(PIN_PREFIX) for stat in listed):
        held = drop_over(store, is_over, dry_run=dry_run, patience=patience)
    slots = _folders_of(entry, held.slots, found) if found else {}
    pinned = tuple(replace(each, slot=slots[each.folder]) for each in found if each.folder in slots)
    collected = tuple(each for each in found if each.folder not in slots)
    proofs = _proofs(state.claim, listed)
    if not dry_run:
        for each in collected:
            _delete_folder(store, each.folder, patience)
        for path in proofs:
            patience.retry(partial(store.delete, path))
    return GcReport(collected=collected, pinned=pinned, over=held.over, remnants=proofs)


def _garbage(state: LogState, claim: int, listed: Collection[ObjectStat]) -> tuple[Garbage, ...]:
    """Find the listed folders that are garbage once `claim` has begun. Pure."""
    named = {record.folder for record in state.commits.values()}
    found = []
    for folder, sizes in sorted(sizes_by_folder(listed).items()):
        ours = [size_bytes for name, size_bytes in sizes.items() if is_object_name(name)]
        if ours and claim_of(folder) < claim and folder not in named:
            found.append(Garbage(folder=folder, n_objects=len(ours), size_bytes=sum(ours)))
    return tuple(found)


def _proofs(claim: int, listed: Collection[ObjectStat]) -> tuple[str, ...]:
    """Find objects of proofs made before `claim` had begun: their makers are dead, or make others. Pure."""
    found = ((stat.path, _PROBE.fullmatch(stat.path)) for stat in listed)
    return tuple(path for path, match in found if match and int(match[1]) <= claim)


def _folders_of(
    entry: Callable[[int], Entry], pinned: Iterable[int], found: Collection[Garbage]
) -> dict[str, int]:
    """Find which commits were in the slots `pinned`, by folder. Their entries are read again."""
    slots: dict[str, int] = {}
    for slot in pinned:
        try:
            body = entry(slot).body
        except MissingObjectError:
            # The pin names a slot that the log doesn't have.
            continue
        except DamagedEntryError:
            # Any save of an earlier claim may be the pinned one.
            slots.update({each.folder: slot for each in found if claim_of(each.folder) < slot})
            continue
        if isinstance(body, CommitEntry):
            slots[body.folder] = slot
    return slots


def _delete_folder(store: Store, folder: str, patience: Patience) -> None:
    """Delete the objects of a save. If another process put a file there, it stays, and so does the folder."""
    listed = patience.retry(lambda: store.list(f"{folder}/"))
    paths = [stat.path for stat in listed if is_object_name(stat.path.removeprefix(f"{folder}/"))]
    # `.metadata` first: without it other readers see no checkpoint.
    first = [path for path in paths if path == f"{folder}/{METADATA_NAME}"]
    _delete_objects(store, first, patience)
    _delete_objects(store, [path for path in paths if path not in first], patience)


def _delete_objects(store: Store, paths: Sequence[str], patience: Patience) -> None:
    if not isinstance(store, StreamedStore) or len(paths) < 2:
        for path in paths:
            patience.retry(partial(store.delete, path))
        return
    # Half as many as a save uses, because one may be running.
    with ThreadPoolExecutor(max(1, store.streams // 2), thread_name_prefix="stepkeeper-delete") as pool:
        list(pool.map(lambda path: patience.retry(partial(store.delete, path)), paths))
