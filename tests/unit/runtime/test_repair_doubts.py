"""What a repair concludes where entries are lost that delete, condemn or prove, and what a person may choose."""

import pytest
from store_parts.damaged_root import (
    copy_before,
    damage,
    goes_on,
    is_stale,
    planned,
    remove,
    repaired,
    save_whole,
    two_starts,
)

from stepkeeper.errors import RefusedError
from stepkeeper.testing.checkpoints import SmallRoot


@pytest.fixture
def root() -> SmallRoot:
    return two_starts()


def test_a_lost_deletion_is_seen_by_the_data_that_is_gone(root: SmallRoot) -> None:
    remove(root, 1)
    damage(root, [6])
    state = repaired(root)
    assert [each.slot for each in state.live] == [2, 4, 5]
    assert state.commits[2].parent is None
    goes_on(root, state)


def test_a_commit_without_data_is_not_latest_where_the_one_after_it_is_lost_too(root: SmallRoot) -> None:
    """Step 40 was committed, and then all others were deleted."""
    for slot in (1, 2, 4):
        remove(root, slot)
    newest = root.log.state.commits[5].folder
    damage(root, [5, 8])
    assert [each.slot for each in planned(root.store).rebuilt.deleted] == [4]
    state = repaired(root, newest)
    assert (state.head, [each.slot for each in state.commits.values()]) == (8, [8])
    assert state.commits[8].folder == newest
    goes_on(root, state)


def test_a_lost_deletion_whose_data_is_there_is_undone(root: SmallRoot) -> None:
    truth = root.log.state
    root.log.delete(root.claim, lambda state: [1])
    damage(root, [6])
    assert repaired(root).commits == truth.commits


def test_a_lost_quarantine_is_seen_by_the_head_that_went_back(root: SmallRoot) -> None:
    root.log.quarantine(root.claim, 5, "read bad")
    root.save(41)
    truth = root.log.state
    damage(root, [6])
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    assert state.commits[5].quarantined


def test_a_lost_proof_of_a_restore_is_not_assumed(root: SmallRoot) -> None:
    root.log.mark_restored(root.claim, 5)
    damage(root, [6])
    state = repaired(root)
    assert (state.head, state.commits[5].verified) == (5, False)


def test_a_commit_that_was_lost_and_then_deleted_stays_deleted(root: SmallRoot) -> None:
    root.save(50)
    root.log.delete(root.claim, lambda state: [4])
    folder = next(path for path in root.contents() if path.startswith("30/")).rpartition("/")[0]
    damage(root, [4])
    state = repaired(root)
    assert (state.head, [each.slot for each in state.live]) == (6, [1, 2, 5, 6])
    # Its data wasn't deleted yet. Nothing says whose it is: it waits for a person.
    assert [each.folder for each in state.commits.values() if each.quarantined] == [folder]


def test_a_save_is_not_taken_for_a_commit_whose_deletion_may_be_lost_too(root: SmallRoot) -> None:
    """Step 30 was committed and deleted, and neither entry can be read. The one save left over never was a commit."""
    stray = save_whole(root, 35)
    remove(root, 4)
    damage(root, [4, 6])
    state = repaired(root)
    assert (state.head, [each.slot for each in state.live]) == (5, [1, 2, 5])
    assert [each.folder for each in state.commits.values() if each.quarantined] == [stray]
    goes_on(root, state)


def test_a_commit_that_was_live_after_all_other_lost_entries_is_proven(root: SmallRoot) -> None:
    """Slot 6 can't have deleted the commit in slot 7, and the proof in slot 9 says that slot 8 hasn't."""
    root.log.void(root.claim, "given up", f"50/3-{'a' * 32}")
    root.save(50)
    remove(root, 1)
    root.log.mark_restored(root.claim, 7)
    truth = root.log.state
    damage(root, [6, 7, 8])
    state = repaired(root)
    assert state.commits == truth.commits
    goes_on(root, state)


def test_torn_data_is_no_proof(root: SmallRoot) -> None:
    record = root.log.state.commits[4]
    root.change(f"{record.folder}/__0_0.distcp", b"")
    damage(root, [4])
    state = repaired(root)
    assert (state.head, state.commits[5].parent, state.commits[4].quarantined) == (5, 2, True)
    again = copy_before(root, 6)
    with pytest.raises(RefusedError, match=r"none of the whole saves .*: __0_0.distcp has 0 bytes"):
        planned(again.store, record.folder)


def test_of_two_saves_after_the_latest_commit_a_person_chooses(root: SmallRoot) -> None:
    committed, stray = root.log.state.commits[5].folder, save_whole(root, 50)
    damage(root, [5], "empty")
    state = repaired(root, committed)
    assert (state.head, state.commits[5].folder, state.commits[5].quarantined) == (5, committed, False)
    assert (state.commits[6].folder, state.commits[6].quarantined) == (stray, True)
    is_stale(root)
    goes_on(root, state)


def test_what_is_older_than_the_latest_commit_is_not_adopted(root: SmallRoot) -> None:
    stray = save_whole(root, 35)
    root.save(50)
    damage(root, [4])
    with pytest.raises(RefusedError, match="none of the whole saves to choose from"):
        planned(root.store, f"7/3-{'a' * 32}")
    with pytest.raises(RefusedError, match="can't have been committed after slot 6, the latest"):
        planned(root.store, stray)
