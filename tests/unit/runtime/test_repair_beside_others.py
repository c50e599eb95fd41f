"""A repair beside writers, readers and pins."""

import pytest
from store_parts.damaged_root import (
    IMPATIENT,
    damage,
    planned,
    repaired,
    two_starts,
)

from stepkeeper.errors import DamagedEntryError, FencedError, RefusedError
from stepkeeper.log import Log
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import carry_out
from stepkeeper.retention.garbage import gc
from stepkeeper.retention.pins import Pin, put_pin
from stepkeeper_testing.checkpoints import SmallRoot, save_small


@pytest.fixture
def root() -> SmallRoot:
    return two_starts()


def test_a_writer_that_appended_meanwhile_is_not_fenced(root: SmallRoot) -> None:
    damage(root, [4])
    plan = planned(root.store)
    root.save(50)
    before = root.contents()
    with pytest.raises(
        RefusedError, match=r"slot 6 of memory://.* was written just now: a job is saving there"
    ):
        carry_out(root.store, Log(root.store), plan, "a test", patience=IMPATIENT)
    assert root.contents() == before
    root.save(60)


def test_a_slot_that_came_back_is_looked_at_again(root: SmallRoot) -> None:
    data = root.store.read(slot_path(1))
    damage(root, [1], "gone")
    plan = planned(root.store)
    root.change(slot_path(1), data)
    with pytest.raises(RefusedError, match=r"00000001\.json was written"):
        carry_out(root.store, Log(root.store), plan, "a test", patience=IMPATIENT)
    root.save(50)


def test_a_writer_whose_put_into_the_damaged_slot_has_no_answer_is_fenced_after_the_repair(
    root: SmallRoot,
) -> None:
    late = Log(root.store, patience=IMPATIENT)
    late.resume(root.claim)
    root.save(50)
    damage(root, [6])
    with pytest.raises(DamagedEntryError):
        save_small(late, root.store, root.claim, 60)
    repaired(root)
    with pytest.raises(FencedError):
        late.settle()
    assert late.pending_slot is None


def test_a_reader_that_stood_before_the_damage_goes_on_behind_the_repair(root: SmallRoot) -> None:
    reader = Log(root.store, patience=IMPATIENT)
    reader.open()
    root.save(50)
    damage(root, [6])
    with pytest.raises(DamagedEntryError):
        reader.refresh()
    state = repaired(root)
    assert reader.refresh() == state


def test_what_a_pin_in_a_damaged_slot_may_hold_is_not_collected(root: SmallRoot) -> None:
    stray = root.give_up(35)
    root.begin(2)
    put_pin(root.store, Pin(slot=1, nonce="a" * 32, holder="an evaluation"))
    root.log.delete(root.claim, lambda state: [1])
    report = gc(root.log, root.store, dry_run=True)
    assert [each.folder for each in report.collected] == [stray]
    damage(root, [1])
    report = gc(root.log, root.store, dry_run=True)
    held = {each.folder for each in report.pinned}
    assert (report.collected[0].folder, len(held)) == (stray, 1)
    assert held.pop().startswith("10/0-")
