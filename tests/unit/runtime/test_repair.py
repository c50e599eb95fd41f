"""Test the repair of a log: its state up to the damage stays, and a whole save without an entry counts."""

from dataclasses import replace

import pytest
from store_parts.damaged_root import (
    DAMAGES,
    IMPATIENT,
    TWO_STARTS,
    damage,
    goes_on,
    is_stale,
    repaired,
)

from stepkeeper.cli.blocks import verify_commit
from stepkeeper.errors import (
    DamagedEntryError,
    FencedError,
    LogFormatError,
    LogGapError,
    RefusedError,
    RestoreError,
)
from stepkeeper.log import BeginEntry, Log, LogState
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import carry_out, plan_repair
from stepkeeper.retention.garbage import gc
from stepkeeper.retention.pins import Pin, put_pin
from stepkeeper_testing.checkpoints import SmallRoot, save_small

TO_INDEX = " ".join(str(step) for step in range(300, 2000, 100))
"""Commits to slot 19, from slot 3 on; the newest index is in slot 16."""


def steps(state: LogState) -> tuple[int | None, list[int]]:
    """Return the step of HEAD, and those of quarantined commits."""
    head = None if state.latest is None else state.latest.step
    return head, [record.step for record in state.commits.values() if record.quarantined]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    ("words", "slots"),
    [
        pytest.param(TWO_STARTS, [4], id="a commit"),
        pytest.param(TWO_STARTS, [5], id="the last commit"),
        pytest.param(f"{TWO_STARTS} 50", [4, 5, 6], id="several commits"),
        pytest.param(TWO_STARTS, [3], id="a begin"),
        pytest.param(f"{TWO_STARTS} begin@2 21", [6], id="a begin that went back"),
        pytest.param(f"{TWO_STARTS} begin 50 60", [7], id="a commit of the last of three starts"),
        pytest.param(f"{TWO_STARTS} voidx13 50 *19", [19], id="an index inside a claim"),
        pytest.param(f"{TWO_STARTS} voidx20", [0, 1], id="entries below the newest index"),
        pytest.param("begin@s5 10", [0], id="a base of another writer"),
    ],
)
def test_the_log_means_the_same_with_what_the_manifests_say(words: str, slots: list[int], how: str) -> None:
    root = SmallRoot(words=words)
    truth = root.log.state
    if how == "gone" and truth.tail in slots:
        how = "cut"  # without it nothing shows that it was there
    bodies = [root.log.entry(slot).body for slot in range(truth.tail + 1) if slot not in slots]
    owners = [body.owner for body in bodies if isinstance(body, BeginEntry)]
    damage(root, slots, how)
    if 0 in slots and truth.tail > 20 and how != "gone":
        assert not plan_repair(root.store, patience=IMPATIENT).is_needed
        assert Log(root.store, patience=IMPATIENT).open() == truth
        return
    with pytest.raises(LogGapError if how == "gone" else DamagedEntryError, match="repair memory://"):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert (state.commits, state.head, state.legacy) == (truth.commits, truth.head, truth.legacy)
    assert state.owner == (owners[-1] if owners else None)
    if how == "gone":
        with pytest.raises(DamagedEntryError, match="marked as lost"):
            Log(root.store, patience=IMPATIENT).entry(slots[0])
    is_stale(root)
    goes_on(root, state, 9000)


@pytest.mark.parametrize(
    ("words", "slots", "head", "aside"),
    [
        pytest.param("100 200 -1 400", [1, 4], 400, [100], id="deleted, its data still there; and HEAD"),
        pytest.param(f"100 200 -1 {TO_INDEX}", [1, 19], 1900, [100], id="the same below the newest index"),
        pytest.param(f"100 ^150 {TO_INDEX}", [2, 19], 1900, [150], id="given up below the newest index"),
        pytest.param("100 ^150", [1], 100, [], id="given up in an entry that can be read"),
        pytest.param("100 *1 200 300", [2, 4], 300, [], id="no commit's slot, and HEAD"),
        pytest.param("100 *1 300", [2, 3], 300, [], id="the same without a commit between"),
        pytest.param("100 +250 300", [2], 300, [250], id="never committed, and HEAD"),
        pytest.param("100 *1 200 !3", [2, 3], 100, [200], id="condemned"),
        pytest.param("100 200 300 !3", [2, 3], 200, [300], id="condemned, and the one before it"),
        pytest.param("100 200 !2 400", [2, 4], 400, [200], id="condemned, and a newer one"),
        pytest.param("100 200 300 !3", [2], 200, [300], id="condemned in an entry that can be read"),
        pytest.param("100 200 300 -2", [2, 3], 300, [200], id="deleted by a later entry, and HEAD"),
        pytest.param("100 200 300 -2", [2], 300, [200], id="deleted in an entry that can be read"),
        pytest.param("100 200 *1 400 -2 600", [2, 3], 600, [200], id="deleted, and a commit after that"),
        pytest.param("100 200 *1 300 -2", [2, 3, 4], 300, [200], id="the same with another entry between"),
        pytest.param("100 200 begin branch 1 2", [4], 2, [], id="a branch's begin"),
        pytest.param("100 200 begin branch 1 2", [5], 2, [], id="a branch's first commit"),
        pytest.param("100 200 begin branch 1 2", [4, 5], 2, [], id="both"),
        pytest.param("100 200 begin branch 1 2", [6], 2, [], id="a branch's second commit"),
        pytest.param("100 +150 begin 200 300", [4], 300, [], id="of a claim whose entries can all be read"),
    ],
)
def test_head_is_the_newest_save_that_fits_and_what_was_ended_is_kept_aside(
    words: str, slots: list[int], head: int, aside: list[int]
) -> None:
    root = SmallRoot(words=f"begin {words}")
    truth = root.log.state
    assert truth.latest is not None
    assert truth.latest.step == head
    damage(root, slots)
    state = repaired(root)
    assert steps(state) == (head, aside)
    assert {record.step for record in state.live} == {record.step for record in truth.live}
    goes_on(root, state, 9000)


@pytest.mark.parametrize("how", [*DAMAGES, "gone, all", "gone, from the second commit on"])
def test_of_a_log_without_an_entry_all_whole_saves_are_commits(how: str) -> None:
    root = SmallRoot(words=TWO_STARTS)
    truth = root.log.state
    slots = {"gone": range(5), "gone, from the second commit on": range(2, 6)}.get(how, range(6))
    damage(root, slots, how.partition(",")[0])
    if "," in how:
        # The claims of the saves show how far the log went at least.
        assert plan_repair(root.store, patience=IMPATIENT).tail == slots[0] - 1
    state = repaired(root)
    assert [record.step for record in state.line] == [40, 30, 20, 10]
    assert {record.folder for record in state.live} == {record.folder for record in truth.live}
    is_stale(root)
    goes_on(root, state)


@pytest.mark.parametrize(
    ("words", "slots", "name", "says", "live"),
    [
        pytest.param("30 40", [1], "__0_0.distcp", "has 0 bytes, not 931", [40], id="not whole"),
        pytest.param("100 200 300 -1", [4], ".metadata", "part of it is deleted", [200, 300], id="cut short"),
        pytest.param("100 200 300 -1", [4], "", "", [200, 300], id="all of it is deleted"),
    ],
)
def test_a_save_of_which_something_is_missing_is_not_live(
    words: str, slots: list[int], name: str, says: str, live: list[int]
) -> None:
    root = SmallRoot(words=f"begin {words}")
    (folder,) = {
        path.rpartition("/")[0] for path in root.contents() if path.startswith(f"{words.partition(' ')[0]}/")
    }
    for path in root.contents():
        if path.startswith(f"{folder}/{name}"):
            root.change(path, b"" if name.startswith("_") else None)
    damage(root, slots)
    aside = plan_repair(root.store, patience=IMPATIENT).rebuilt.aside
    assert [says in why for why in aside.values()] == ([True] if says else [])
    state = repaired(root)
    assert [record.step for record in state.live] == live
    assert state.live[0].parent is None
    assert [record.folder for record in state.commits.values() if record.quarantined] == [folder] * len(aside)
    assert not any(verify_commit(root.store, record, patience=IMPATIENT).bad for record in state.live)
    goes_on(root, state, 9000)


@pytest.mark.parametrize(
    ("words", "slot", "begins"),
    [("begin 10 scratch void", 3, True), ("begin 100 scratch 5 !3 void", 5, False)],
)
def test_a_start_from_scratch_stays_one(words: str, slot: int, begins: bool) -> None:
    root = SmallRoot(words=words)
    damage(root, [slot])
    assert repaired(root).head is None
    root.log = Log(root.store)
    if begins:
        root.play("begin")
    else:
        with pytest.raises(RestoreError, match="no latest one"):
            root.play("begin")


def test_a_log_of_a_newer_release_is_left_alone() -> None:
    root = SmallRoot(words=TWO_STARTS)
    damage(root, [4])
    root.change(slot_path(5), b'{"format":4}')
    with pytest.raises(LogFormatError, match="has format 4"):
        plan_repair(root.store, patience=IMPATIENT)


@pytest.mark.parametrize(
    "path",
    [f"7/50-{'0' * 32}/junk", f"7/50-{'0' * 32}/.metadata", f"7/{10**9}-{'0' * 32}/manifest.0.json"],
)
def test_a_stray_object_is_no_save_of_a_later_claim(path: str) -> None:
    root = SmallRoot(words="begin 100")
    root.change(path, b"x")
    assert not plan_repair(root.store, patience=IMPATIENT).is_needed
    damage(root, [1])
    assert plan_repair(root.store, patience=IMPATIENT).marked == ()


@pytest.fixture
def root() -> SmallRoot:
    return SmallRoot(words=TWO_STARTS)


@pytest.mark.parametrize("is_back", [False, True], ids=["a writer appended", "a lost slot came back"])
def test_what_was_written_after_the_plan_is_not_overruled(root: SmallRoot, is_back: bool) -> None:
    data = root.store.read(slot_path(1))
    damage(root, [1] if is_back else [4], "gone" if is_back else "flipped")
    plan = plan_repair(root.store, patience=IMPATIENT)
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
    assert late.settle() is None
    assert reader.refresh() == state


def test_an_index_that_contradicts_itself_is_not_started_from() -> None:
    root = SmallRoot(words=f"begin 100 200 {TO_INDEX}")
    truth = root.log.state
    entry = root.log.entry(16)
    assert entry.index is not None
    commits = tuple(replace(record, parent=99) for record in entry.index.commits)
    root.change(slot_path(16), replace(entry, index=replace(entry.index, commits=commits)).to_json())
    with pytest.raises(LogFormatError, match="slot 16 names commit 99"):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    goes_on(root, state, 9000)


def filled(hole: int, act: str) -> SmallRoot:
    """Empty a slot of two starts, and let a process take it that has read only the slots before it."""
    root = SmallRoot()
    late = Log(root.store, patience=IMPATIENT)
    for slot, word in enumerate(TWO_STARTS.split()):
        if slot == hole:
            late.resume(root.claim)
            claim = root.claim
        root.play(word)
    damage(root, [hole], "gone")
    root.log, root.claim, log, last = late, claim, root.log, root.claim
    root.play(act)
    root.log, root.claim = log, last
    return root


@pytest.mark.parametrize(("hole", "act"), [(3, "void"), (3, "35"), (4, "void")])
def test_what_came_into_an_emptied_slot_is_told_from_its_own_entry(hole: int, act: str) -> None:
    root = filled(hole, act)
    intruder = root.store.read(slot_path(hole))
    with pytest.raises(DamagedEntryError, match="stepkeeper repair memory://"):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert steps(state) == (40, [35] if act == "35" else [])
    assert [record.step for record in state.live] == [10, 20, 30, 40]
    assert root.store.read(slot_path(hole)) == intruder
    goes_on(root, state)


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
