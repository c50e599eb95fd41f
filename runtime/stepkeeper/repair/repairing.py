"""Plan the repair of a log, and carry it out: by appending, never by changing what is there."""

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
from stepkeeper.repair.saves import look_at
from stepkeeper.storage import ObjectStat, Store
from stepkeeper.storage.base import PROBE_PREFIX
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["QUIET_S", "Plan", "Writing", "carry_out", "find_writing", "plan_repair"]

QUIET_S: Final = 600
"""A root that nothing was written to for so many seconds is taken for one whose job is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The damage of a log, and what is to stand for it."""

    faults: Mapping[int, str]
    """What is wrong with each slot that a start needs and that can't be read."""

    tail: int
    """The greatest slot that is there; -1 if none is."""

    rebuilt: Rebuilt
    marked: tuple[int, ...]
    """The empty slots that are marked as lost."""

    body: BeginEntry
    unfinished: int
    """The number of saves that no entry names and that hadn't come to their end."""

    @property
    def is_needed(self) -> bool:
        """True if a start needs an entry that can't be read, or an empty slot stops it."""
        return bool(self.faults)

    @property
    def slot(self) -> int:
        """The slot that the repair is appended to."""
        return self.rebuilt.state.tail + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """The last write to a root, as far as it is known."""

    path: str
    age_s: float | None
    """How long ago it was, by the store's own clock. None: the store doesn't tell times."""

    @property
    def is_recent(self) -> bool:
        """True if whoever wrote it may be writing still, as far as can be known."""
        return self.age_s is None or self.age_s < QUIET_S


def plan_repair(store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> Plan:
    """Read the log from its newest index on, and the manifests of saves that it doesn't name. Nothing is written.

    Args:
        store: The root's store.
        patience: How long to retry while the store doesn't answer.

    Raises:
        LogFormatError: A newer release has written an entry.
        StorageError: The store gave no answer, or refused.

    """
    log = DamagedLog(store, patience)
    sizes = log.sizes
    unknown = {folder for folder in sizes if claim_of(folder) >= (log.start.claim or 0)}
    unknown -= {record.folder for record in log.start.commits.values()}
    lost_before: Collection[int] = ()
    if log.faults and unknown:
        named, lost_before = log.read_older()
        unknown -= named
    ended = {folder for folder in unknown if manifest_name(0) in sizes[folder]} if log.faults else set()
    saves = [look_at(store, folder, sizes[folder], patience) for folder in sorted(ended)]
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
        unfinished=len(unknown) - len(ended),
    )


def _begin(state: LogState, lost: Collection[int], last: BeginEntry | None) -> BeginEntry:
    """Make the begin that repairs the log: it continues from the end of the log, for the same owner."""
    # Whether the last claim has saved nothing: that it began from scratch is why HEAD is nothing then.
    unsaved = all(record.claim != state.claim for record in state.commits.values())
    scratch = state.head is None and state.legacy is None and last is not None and last.scratch and unsaved
    return BeginEntry(
        base=state.head,
        legacy=None if state.head is not None else state.legacy,
        scratch=scratch or None,
        owner=state.owner,
        lost=tuple(sorted(lost)),
    )


def find_writing(store: Store, slot: int, *, probe: bool, patience: Patience) -> Writing:
    """Find out when something was last written to the root.

    Args:
        store: The root's store.
        slot: The log's next slot.
        probe: Put a probe object to learn the store's own time; without it, this machine's clock is asked.
        patience: How long to retry while the store doesn't answer.

    Raises:
        StorageError: The store gave no answer, or refused.

    """
    listed = patience.retry(lambda: store.list(""))
    newest = max(listed, key=lambda stat: stat.time_unix_s or 0.0, default=None)
    if newest is None or any(stat.time_unix_s is None for stat in listed):
        return Writing(path="" if newest is None else newest.path, age_s=None)
    now_unix_s = _ask_time(store, slot, patience) if probe else time.time()
    if now_unix_s is None or newest.time_unix_s is None:
        return Writing(path=newest.path, age_s=None)
    return Writing(path=newest.path, age_s=max(0.0, now_unix_s - newest.time_unix_s))


def _ask_time(store: Store, slot: int, patience: Patience) -> float | None:
    """Learn the store's time from an object that is put now."""
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
    """Mark the empty slots as lost, and append the begin that stands for all entries before it.

    Nothing that is in the log is changed. Every earlier claim is stale from then on. If this is cut short, it can be
    planned and carried out again.

    Args:
        store: The root's store.
        log: The root's log.
        plan: The plan, as it was shown.
        host: This command and its host, for people.
        patience: How long to retry while the store doesn't answer.

    Raises:
        RefusedError: Somebody has written to the log since it was read.
        UnknownOutcomeError: The store gave no answer. Repair once more: that finds out.
        StorageError: The store refused.

    """
    nonce = new_nonce()
    for slot in plan.marked:
        if not patience.retry(partial(store.put_if_absent, slot_path(slot), lost_marker(nonce))):
            _check_marked(store, slot, lost_marker(nonce), patience)
    return log.repair(plan.rebuilt.state, replace(plan.body, host=host), nonce)


def _check_marked(store: Store, slot: int, marker: bytes, patience: Patience) -> None:
    """Check that the mark is there, put by an earlier try that got no answer. Raises RefusedError."""
    if patience.retry(lambda: store.read(slot_path(slot))) != marker:
        raise RefusedError(
            f"{store.uri}/{slot_path(slot)} was written while the repair was under way: stop the job, and look again"
        )
