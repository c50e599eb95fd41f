"""Repairing a log: what it says up to the damage stays, and a save without an entry counts if it is whole."""

import secrets
from dataclasses import replace

import pytest
from store_parts.damaged_root import (
    DAMAGES,
    IMPATIENT,
    damage,
    goes_on,
    is_stale,
    planned,
    remove,
    repaired,
    save_whole,
    two_starts,
)

from stepkeeper.errors import DamagedEntryError, LogFormatError, LogGapError
from stepkeeper.log import ForeignBase, Log, LogState
from stepkeeper.log.tail import slot_path
from stepkeeper_testing.checkpoints import SmallRoot, save_small
from stepkeeper_testing.pod import pod_identity


@pytest.fixture
def root() -> SmallRoot:
    return two_starts()


def live_steps(state: LogState) -> list[int]:
    return [record.step for record in state.live]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("slot", [4, 5])
def test_a_commit_without_its_entry_stays_one_by_its_manifests(root: SmallRoot, slot: int, how: str) -> None:
    truth = root.log.state
    if slot == 5:
        how = "cut" if how == "gone" else how  # without it nothing shows that it was there
    damage(root, [slot], how)
    with pytest.raises(
        LogGapError if how == "gone" else DamagedEntryError, match="stepkeeper repair memory://"
    ):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert (state.commits, state.head, state.owner) == (truth.commits, truth.head, truth.owner)
    is_stale(root)
    goes_on(root, state)


def test_several_commits_without_entries_go_to_their_slots_in_order(root: SmallRoot) -> None:
    root.save(50)
    truth = root.log.state
    damage(root, [4, 5, 6])
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    goes_on(root, state)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_begin_loses_its_owner_and_no_more(root: SmallRoot, how: str) -> None:
    truth = root.log.state
    damage(root, [3], how)
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    assert truth.owner is not None
    assert state.owner == replace(truth.owner, restart_attempt=0)
    is_stale(root)
    goes_on(root, state)


def test_a_begin_that_went_back_is_known_by_the_commit_after_it(root: SmallRoot) -> None:
    root.begin(2, base=2)
    root.save(21)
    truth = root.log.state
    assert (truth.commits[7].parent, truth.head) == (2, 7)
    damage(root, [6])
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)


@pytest.mark.parametrize("slots", [[7], [8], [7, 8], [9]])
def test_a_branch_is_apart_from_the_line_before(root: SmallRoot, slots: list[int]) -> None:
    """Its slots: 6 begin, 7 begins a branch, 8 and 9 steps 1 and 2."""
    root.begin(2)
    root.claim = root.log.begin(pod_identity(restart_attempt=2), branch=True, after=root.claim)
    root.save(1)
    root.save(2)
    truth = root.log.state
    damage(root, slots)
    state = repaired(root)
    assert live_steps(state) == [10, 20, 30, 40, 1, 2]
    assert state.head == truth.head
    assert state.line[0].step == 2
    goes_on(root, state)


def test_a_save_that_had_not_come_to_its_end_is_garbage(root: SmallRoot) -> None:
    stray = root.give_up(35)
    damage(root, [4])
    assert planned(root.store).unfinished == 1
    state = repaired(root)
    assert state.commits == root.log.state.commits
    goes_on(root, state)
    assert not any(path.startswith(stray) for path in root.contents())


def test_a_save_that_the_log_gave_up_is_no_commit(root: SmallRoot) -> None:
    root.log.void(root.claim, "given up", save_whole(root, 35))
    truth = root.log.state
    damage(root, [5])
    assert repaired(root).commits == truth.commits


@pytest.mark.parametrize("index", [3, 5, 17])
def test_a_save_that_an_entry_below_the_newest_index_gave_up_is_no_commit(
    root: SmallRoot, index: int
) -> None:
    root.log.void(root.claim, "given up", save_whole(root, 35))
    while root.log.state.tail < index + 3:
        root.save(50 + root.log.state.tail)
    truth = root.log.state
    damage(root, [truth.tail - 1])
    assert repaired(root).commits == truth.commits


def test_of_two_saves_for_one_slot_the_earlier_one_is_kept_aside(root: SmallRoot) -> None:
    truth = root.log.state
    stray = save_whole(root, 35)
    damage(root, [4])
    state = repaired(root)
    assert (state.head, state.commits[4].folder) == (5, stray)
    aside = {each.folder for each in state.commits.values() if each.quarantined}
    assert aside == {truth.commits[4].folder}
    with pytest.raises(DamagedEntryError, match="marked as lost"):
        Log(root.store, patience=IMPATIENT).entry(6)
    is_stale(root)
    goes_on(root, state)
    assert aside <= {path.rpartition("/")[0] for path in root.contents()}


def test_a_save_that_is_not_whole_is_kept_aside(root: SmallRoot) -> None:
    record = root.log.state.commits[4]
    root.change(f"{record.folder}/__0_0.distcp", b"")
    damage(root, [4])
    assert [*planned(root.store).rebuilt.aside.values()] == ["__0_0.distcp has 0 bytes, not 931"]
    state = repaired(root)
    assert (live_steps(state), state.head, state.commits[5].parent) == ([10, 20, 40], 5, 2)
    assert state.commits[6].folder == record.folder
    assert state.commits[6].quarantined
    goes_on(root, state)


def test_a_save_of_a_claim_whose_entries_can_all_be_read_was_never_committed(root: SmallRoot) -> None:
    stray = save_whole(root, 45)
    root.begin(2)
    root.save(50)
    root.save(60)
    truth = root.log.state
    damage(root, [7])
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    goes_on(root, state)
    assert not any(path.startswith(stray) for path in root.contents())


def test_a_lost_deletion_is_seen_by_the_data_that_is_gone(root: SmallRoot) -> None:
    remove(root, 1)
    damage(root, [6])
    state = repaired(root)
    assert [each.slot for each in state.live] == [2, 4, 5]
    assert state.commits[2].parent is None
    goes_on(root, state)


def test_what_a_readable_entry_deleted_is_not_brought_back(root: SmallRoot) -> None:
    """Its own entry can't be read, and its data is there still."""
    root.save(50)
    root.log.delete(root.claim, lambda state: [4])
    damage(root, [4])
    state = repaired(root)
    assert (state.head, live_steps(state)) == (6, [10, 20, 40, 50])
    goes_on(root, state)


def test_what_a_readable_entry_condemned_stays_condemned(root: SmallRoot) -> None:
    root.log.quarantine(root.claim, 5, "read bad")
    damage(root, [4])
    state = repaired(root)
    assert (state.head, live_steps(state)) == (4, [10, 20, 30])
    assert state.commits[5].quarantined


@pytest.mark.parametrize("how", DAMAGES)
def test_an_index_inside_a_claim_is_rebuilt(root: SmallRoot, how: str) -> None:
    while root.log.state.tail < 18:
        root.log.void(root.claim, "nothing to save", f"{root.log.state.tail}/3-{'a' * 32}")
    record = root.save(50)
    root.log.mark_restored(root.claim, record.slot)
    truth = root.log.state
    assert truth.index == record.slot == 19
    damage(root, [19], how)
    state = repaired(root)
    assert (state.commits, state.head, state.owner) == (truth.commits, truth.head, truth.owner)
    goes_on(root, state)


def test_what_is_below_the_newest_index_is_not_needed(root: SmallRoot) -> None:
    damage(root, [0, 1])
    assert Log(root.store, patience=IMPATIENT).open() == root.log.state
    assert not planned(root.store).is_needed
    root.save(50)


def test_a_gap_below_the_newest_index_is_marked(root: SmallRoot) -> None:
    truth = root.log.state
    damage(root, [0, 1], "gone")
    state = repaired(root)
    assert (state.commits, state.head, state.owner, state.root) == (
        truth.commits, truth.head, truth.owner, truth.root,
    )  # fmt: skip
    with pytest.raises(DamagedEntryError, match="the slot was gone, and is marked as lost"):
        Log(root.store, patience=IMPATIENT).entry(1)
    is_stale(root)
    goes_on(root, state)


@pytest.mark.parametrize("how", [*DAMAGES, "gone, all"])
def test_of_a_log_without_an_entry_all_whole_saves_are_commits(root: SmallRoot, how: str) -> None:
    truth = root.log.state
    damage(root, range(5 if how == "gone" else 6), how.removesuffix(", all"))
    if how == "gone, all":
        # The claims of the saves show how far the log went at least.
        assert planned(root.store).tail == -1
    state = repaired(root)
    assert live_steps(state) == [10, 20, 30, 40]
    assert [record.step for record in state.line] == [40, 30, 20, 10]
    assert {record.folder for record in state.live} == {record.folder for record in truth.live}
    is_stale(root)
    goes_on(root, state)


def test_a_log_whose_end_is_gone_goes_on_from_the_saves_of_its_last_claim(root: SmallRoot) -> None:
    damage(root, range(2, 6), "gone")
    assert Log(root.store).open().head == 1, "nothing else shows it"
    state = repaired(root)
    assert [record.step for record in state.line] == [40, 30, 20, 10]
    goes_on(root, state)


def test_a_repair_of_the_repair(root: SmallRoot) -> None:
    damage(root, [3, 4], "empty")
    repaired(root)
    root.claim = Log(root.store).begin(pod_identity(restart_attempt=2))
    root.log.open()
    root.save(50)
    damage(root, [6, 7])
    state = repaired(root)
    assert (live_steps(state), state.head) == ([10, 20, 30, 40, 50], 8)
    goes_on(root, state)


def test_a_base_of_another_writer_stays_what_latest_means() -> None:
    root = SmallRoot(f"memory://{secrets.token_hex(8)}")
    base = ForeignBase(step=5, folder="5")
    claim = root.log.begin(base=base)
    save_small(root.log, root.store, claim, 10)
    truth = root.log.state
    damage(root, [0])
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    assert state.commits[1].legacy == base


def test_a_start_from_scratch_that_saved_nothing_yet_stays_one(root: SmallRoot) -> None:
    root.claim = root.log.begin(pod_identity(restart_attempt=2), scratch=True)
    root.log.void(root.claim, "given up", f"1/6-{'a' * 32}")
    damage(root, [7])
    assert repaired(root).head is None
    assert Log(root.store).begin(pod_identity(restart_attempt=3)).slot == 9


def test_a_log_of_a_newer_release_is_left_alone(root: SmallRoot) -> None:
    damage(root, [4])
    root.change(slot_path(5), b'{"format":4}')
    with pytest.raises(LogFormatError, match="has format 4"):
        planned(root.store)
