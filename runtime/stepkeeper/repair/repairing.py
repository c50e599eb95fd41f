"""Plan the repair of a log, and carry it out: by appending, never by changing what is there."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepkeeper.errors import RefusedError
from stepkeeper.log import Claim, Log
from stepkeeper.log.entries import lost_marker, new_nonce
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.damage import ReadLog, read_log
from stepkeeper.repair.evidence import find_start
from stepkeeper.repair.rebuild import Rebuilt, rebuild, repair_body
from stepkeeper.repair.saves import find_saves, sizes_by_folder
from stepkeeper.storage import ObjectStat, Store
from stepkeeper.storage.base import PROBE_PREFIX
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["QUIET_S", "Plan", "Writing", "carry_out", "find_writing", "plan_repair"]

QUIET_S: Final = 600
"""A root that nothing was written to for so many seconds is taken for one whose job is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A log as it was read, and what is to stand for it."""

    log: ReadLog
    rebuilt: Rebuilt

    @property
    def is_needed(self) -> bool:
        """True if a start needs an entry that is damaged, or an empty slot stops it."""
        return bool(self.log.gone) or self.rebuilt.is_needed

    @property
    def slot(self) -> int:
        """The slot that the repair is appended to."""
        return self.rebuilt.state.tail + 1

    @property
    def marked(self) -> tuple[int, ...]:
        """The empty slots that are marked as lost."""
        return (*self.log.gone, *self.rebuilt.reserved)


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


def plan_repair(store: Store, *, adopt: str | None = None, patience: Patience = DEFAULT_PATIENCE) -> Plan:
    """Read the whole log, and the manifests of saves that it doesn't tell of, and plan a repair. Nothing is written.

    Args:
        store: The root's store.
        adopt: Folder of a save that isn't proven to have been committed, and that is to be the latest commit.
        patience: How long to retry while the store doesn't answer.

    Raises:
        LogFormatError: A newer release has written an entry, or the entries contradict each other.
        RefusedError: `adopt` can't be the latest commit.
        StorageError: The store gave no answer, or refused.

    """
    log = read_log(store, patience)
    folders = sizes_by_folder(patience.retry(lambda: store.list("")))
    _, known = find_start(log.entries)
    since = known.claim or 0
    saves = (
        find_saves(store, folders, named=log.folders, since=since, patience=patience) if log.faults else ()
    )
    return Plan(log=log, rebuilt=rebuild(log.entries, saves, folders, adopt=adopt))


def find_writing(store: Store, slot: int, *, probe: bool, patience: Patience = DEFAULT_PATIENCE) -> Writing:
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
    body = repair_body(plan.rebuilt, plan.log.entries, host)
    return log.repair(plan.rebuilt.state, body, nonce)


def _check_marked(store: Store, slot: int, marker: bytes, patience: Patience) -> None:
    """Check that the mark is there, put by an earlier try that got no answer. Raises RefusedError."""
    if patience.retry(lambda: store.read(slot_path(slot))) != marker:
        raise RefusedError(
            f"{store.uri}/{slot_path(slot)} was written while the repair was under way: stop the job, and look again"
        )
