"""Damage and repair the log of a root, and check what must hold after any repair."""

from collections.abc import Callable, Collection, Mapping
from typing import Final

import pytest

from stepkeeper.errors import FencedError
from stepkeeper.log import Log, LogState
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import carry_out, plan_repair
from stepkeeper.retention.garbage import gc
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot, save_small
from stepkeeper_testing.pod import pod_identity

IMPATIENT: Final = Patience(total_s=0, sleep=lambda _: None)
TWO_STARTS: Final = "begin 10x2 20 begin 30 40x2"


def flip(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


DAMAGES: Mapping[str, Callable[[bytes], bytes | None]] = {
    "flipped": flip,
    "cut": lambda data: data[:-9],
    "empty": lambda data: b"",
    "gone": lambda data: None,
}


def damage(root: SmallRoot, slots: Collection[int], how: str = "flipped") -> None:
    for slot in slots:
        root.change(slot_path(slot), DAMAGES[how](root.store.read(slot_path(slot))))


def repaired(root: SmallRoot) -> LogState:
    """Repair the log, check that it only grew, and open it as a start does."""
    before = root.contents()
    plan = plan_repair(root.store, patience=IMPATIENT)
    assert root.contents() == before
    assert plan.is_needed
    carry_out(root.store, Log(root.store, patience=IMPATIENT), plan, "a test", patience=IMPATIENT)
    after = root.contents()
    assert {path: after[path] for path in before} == before
    added = {slot_path(slot) for slot in (*plan.marked, plan.slot)}
    assert set(after) - set(before) == added
    return Log(root.store, patience=IMPATIENT).open()


def goes_on(root: SmallRoot, state: LogState, step: int = 90) -> None:
    """Check that the next start begins, restores what is latest, saves, deletes and collects."""
    log = Log(root.store, patience=IMPATIENT)
    claim = log.begin(pod_identity(restart_attempt=7), take_over=True)
    assert log.latest(claim) == state.latest
    if state.head is not None:
        log.mark_restored(claim, state.head)
    record = save_small(log, root.store, claim, step)
    assert record.parent == state.head
    gc(log, root.store, patience=IMPATIENT)
    folders = {path.rpartition("/")[0] for path in root.contents()}
    assert {each.folder for each in log.state.commits.values()} <= folders
    assert Log(root.store, patience=IMPATIENT).open() == log.state


def is_stale(root: SmallRoot) -> None:
    """Check that the writer from before the damage can append nothing."""
    with pytest.raises(FencedError):
        root.save(80)
    with pytest.raises(FencedError):
        Log(root.store, patience=IMPATIENT).resume(root.claim)
