"""Plan the repair of a log, and carry it out: entries are appended, never changed."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from stepkeeper.checkpoint.manifest import claim_of, manifest_name
from stepkeeper.errors import RefusedError
from stepkeeper.log import BeginEntry, Claim, Log, LogState
from stepkeeper.log.entries import lost_marker, new_nonce
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.damage import DamagedLog
from stepkeeper.repair.rebuild import Rebuilt, place_saves, rebuild
from stepkeeper.repair.saves import inspect_save
from stepkeeper.storage import ObjectStat, Store
from stepkeeper.storage.base import PROBE_PREFIX
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["QUIET_S", "LastWrite", "Plan", "carry_out", "find_last_write", "plan_repair"]

QUIET_S: Final = 600
"""If nothing was written to a root for this many seconds, its job counts as over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The damage of a log, and its replacement."""

    faults: Mapping[int, str]
    """The fault of each slot that a start needs and that can't be read."""

    tail: int
    """The greatest slot that exists; -1 if none does."""

    rebuilt: Rebuilt
    marked: tuple[int, ...]
    """The empty slots that are marked as lost."""

    body: BeginEntry
    unfinished: int
    """The number of unfinished saves that no entry names."""

    @property
    def is_needed(self) -> bool:
        """True if a start needs an entry that can't be read, or an empty slot stops it."""
        return bool(self.faults)

    @property
    def slot(self) -> int:
        """The slot that the repair is appended to."""
        return self.rebuilt.state.tail + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWrite:
    """The last write to a root, as far as it is known."""

    path: str
    age_s: float | None
    """How long ago it was, by the store's own clock. None: the store doesn't report times."""

    @property
    def is_recent(self) -> bool:
        """True if its writer may still be writing, as far as is known."""
        return self.age_s is None or self.age_s < QUIET_S


def plan_repair(store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> Plan:
    """Read the log from its newest index on, and the manifests of saves that it doesn't name. Nothing is written.

    Raises LogFormatError if a newer release has written an entry, or StorageError.
    """
    log = DamagedLog(store, patience)
    sizes = log.sizes
    # Saves of claims before that of the newest index are commits in it, or garbage.
    unknown = {folder for folder in sizes if claim_of(folder) >= (log.start.claim or 0)}
    unknown -= {record.folder for record in log.start.commits.values()}
    lost_before: Collection[int] = ()
    if log.faults and unknown:
        named, lost_before = log.read_older()
        unknown -= named
    # Rank 0's manifest is written last.
    finished = {folder for folder in unknown if manifest_name(0) in sizes[folder]} if log.faults else set()
    saves = [inspect_save(store, folder, sizes[folder], patience) for folder in sorted(finished)]
    placed, rest = place_saves(
        saves, log.start, log.entries, lost_before=lost_before, claims=log.claims, tail=log.tail
    )
    rebuilt = rebuild(log.start, log.entries, placed, rest, sizes)
    added = range(log.tail + 1, rebuilt.state.tail + 1)
    return Plan(
        faults=log.faults,
        tail=log.tail,
        rebuilt=rebuilt,
        marked=(*log.gone, *added),
        body=_begin(rebuilt.state, {*log.faults, *added}, log.last_begin(rebuilt.state)),
        unfinished=len(unknown) - len(finished),
    )


def _begin(state: LogState, lost: Collection[int], last: BeginEntry | None) -> BeginEntry:
    """Build the begin that repairs the log: it continues from the end of the log, for the same owner."""
    # If the last claim has saved nothing and began from scratch, that is why HEAD is nothing.
    unsaved = all(record.claim != state.claim for record in state.commits.values())
    scratch = state.head is None and state.legacy is None and last is not None and last.scratch and unsaved
    return BeginEntry(
        base=state.head,
        legacy=None if state.head is not None else state.legacy,
        scratch=scratch or None,
        owner=state.owner,
        lost=tuple(sorted(lost)),
    )


def find_last_write(store: Store, slot: int, *, probe: bool, patience: Patience) -> LastWrite:
    """Find the last write to the root, whose log's next slot is `slot`. Raises StorageError.

    `probe`: put a probe object to read the store's own clock; without it, this machine's clock is used.
    """
    listed = patience.retry(lambda: store.list(""))
    newest = max(listed, key=lambda stat: stat.time_unix_s or 0.0, default=None)
    if newest is None or any(stat.time_unix_s is None for stat in listed):
        return LastWrite(path="" if newest is None else newest.path, age_s=None)
    now_unix_s = _read_store_clock(store, slot, patience) if probe else time.time()
    if now_unix_s is None or newest.time_unix_s is None:
        return LastWrite(path=newest.path, age_s=None)
    return LastWrite(path=newest.path, age_s=max(0.0, now_unix_s - newest.time_unix_s))


def _read_store_clock(store: Store, slot: int, patience: Patience) -> float | None:
    """Read the store's clock from an object that is put now."""
    path = f"{PROBE_PREFIX}{slot:08d}-{new_nonce()}"
    try:
        patience.retry(lambda: store.put_if_absent(path, b"0"))
        listed: Collection[ObjectStat] = patience.retry(lambda: store.list(path))
    finally:
        patience.retry(lambda: store.delete(path))
    return next((stat.time_unix_s for stat in listed), None)


def carry_out(
    store: Store, log: Log, plan: Plan, host: str, *, patience: Patience = DEFAULT_PATIENCE
) -> Claim:
    """Mark the empty slots as lost, and append the begin that replaces all entries before it.

    Existing entries aren't changed. Every earlier claim is stale from then on. If this is interrupted, it can
    be planned and carried out again. `host` names this command and its host for people. Raises RefusedError
    if another process has written to the log since it was read; UnknownOutcomeError: run the repair again to
    find out; StorageError.
    """
    nonce = new_nonce()
    for slot in plan.marked:
        if not patience.retry(partial(store.put_if_absent, slot_path(slot), lost_marker(nonce))):
            _check_marked(store, slot, lost_marker(nonce), patience)
    return log.repair(plan.rebuilt.state, replace(plan.body, host=host), nonce)


def _check_marked(store: Store, slot: int, marker: bytes, patience: Patience) -> None:
    """Check that the slot has our mark, put by an earlier try that got no answer. Raises RefusedError."""
    if patience.retry(lambda: store.read(slot_path(slot))) != marker:
        raise RefusedError(
            f"{store.uri}/{slot_path(slot)} was written during the repair: stop the job, then repair again"
        )
