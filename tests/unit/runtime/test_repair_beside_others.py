"""A repair beside writers, readers and pins."""

import pytest
from store_parts.damaged_root import IMPATIENT, TWO_STARTS, damage, planned, repaired

from stepkeeper.errors import DamagedEntryError, FencedError, RefusedError
from stepkeeper.log import Log
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import carry_out
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.retention.pins import Pin, put_pin
from stepkeeper_testing.checkpoints import SmallRoot, save_small


@pytest.fixture
def root() -> SmallRoot:
    root = SmallRoot()
    root.play(TWO_STARTS)
    return root


@pytest.mark.parametrize("is_back", [False, True], ids=["a writer appended", "a lost slot came back"])
def test_what_was_written_after_the_plan_is_not_overruled(root: SmallRoot, is_back: bool) -> None:
    data = root.store.read(slot_path(1))
    damage(root, [1] if is_back else [4], "gone" if is_back else "flipped")
    plan = planned(root.store)
    if is_back:
        root.change(slot_path(1), data)
    else:
        root.save(50)
    before = root.contents()
    says = r"00000001\.json was written" if is_back else r"slot 6 of .* a job is saving there"
    with pytest.raises(RefusedError, match=says):
        carry_out(root.store, Log(root.store), plan, "a test", patience=IMPATIENT)
    assert root.contents() == before
    root.save(60)


def test_a_writer_whose_put_has_no_answer_is_fenced_and_a_reader_reads_on(root: SmallRoot) -> None:
    late, reader = Log(root.store, patience=IMPATIENT), Log(root.store, patience=IMPATIENT)
    late.resume(root.claim)
    reader.open()
    root.save(50)
    damage(root, [6])
    with pytest.raises(DamagedEntryError):
        save_small(late, root.store, root.claim, 60)
    with pytest.raises(DamagedEntryError):
        reader.refresh()
    state = repaired(root)
    with pytest.raises(FencedError):
        late.settle()
    assert late.pending_slot is None
    assert reader.refresh() == state


def test_what_a_pin_in_a_damaged_slot_may_hold_is_not_collected(root: SmallRoot) -> None:
    stray = root.give_up(35)
    root.play("begin")
    put_pin(root.store, Pin(slot=1, nonce="a" * 32, holder="an evaluation"))
    root.play("-1")
    report = gc(root.log, root.store, dry_run=True)
    assert [each.folder for each in report.collected] == [stray]
    damage(root, [1])
    report = gc(root.log, root.store, dry_run=True)
    assert report.collected[0].folder == stray
    assert [each.folder.partition("-")[0] for each in report.pinned] == ["10/0"]


@pytest.mark.parametrize("collects", ["sweep", "gc"])
def test_what_a_pin_of_a_lost_slot_may_hold_stays_whatever_commit_a_repair_put_there(collects: str) -> None:
    """The pin is of the commit of step 200, whose slot was 2; the repair gives it slot 3, and slot 2 to no commit."""
    root = SmallRoot()
    root.play("begin 100 200 *2")
    pinned = root.log.state.commits[2].folder
    put_pin(root.store, Pin(slot=2, nonce="a" * 32, holder="an evaluation"))
    damage(root, [2, 3])
    assert repaired(root).commits[3].folder == pinned
    root.log = Log(root.store, patience=IMPATIENT)
    root.play("begin 300")
    gone = root.log.delete(root.claim, lambda _: [3])
    if collects == "sweep":
        left = sweep(root.store, [Garbage(folder=each.folder, slot=each.slot) for each in gone])
        assert [each.folder for each in left] == [pinned]
    else:
        root.play("begin")
        assert pinned in {each.folder for each in gc(root.log, root.store, patience=IMPATIENT).pinned}
    assert any(path.startswith(pinned) for path in root.contents())
