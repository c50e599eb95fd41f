"""Repairing a log: what is proven stays, what isn't is kept apart, and the old entries stay as they are."""

import secrets
from dataclasses import replace

import pytest
from store_parts.damaged_root import (
    DAMAGES,
    IMPATIENT,
    copy_before,
    damage,
    goes_on,
    is_stale,
    planned,
    repaired,
    save_whole,
    two_starts,
    unlike,
)

from stepkeeper.errors import DamagedEntryError, LogFormatError, LogGapError, RestoreError
from stepkeeper.log import ForeignBase, Log
from stepkeeper.log.tail import slot_path
from stepkeeper.testing.checkpoints import SmallRoot, save_small
from stepkeeper.testing.pod import pod_identity


@pytest.fixture
def root() -> SmallRoot:
    return two_starts()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_commit_in_the_middle_is_proven_by_the_next_and_its_manifests(root: SmallRoot, how: str) -> None:
    truth = root.log.state
    damage(root, [4], how)
    with pytest.raises(
        LogGapError if how == "gone" else DamagedEntryError, match="stepkeeper repair memory://"
    ):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert (state.commits, state.head, state.owner) == (truth.commits, truth.head, truth.owner)
    is_stale(root)
    goes_on(root, state)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty"])
def test_the_newest_commit_is_not_proven_and_kept_apart(root: SmallRoot, how: str) -> None:
    truth = root.log.state
    damage(root, [5], how)
    state = repaired(root)
    assert (state.head, [each.slot for each in state.live]) == (4, [1, 2, 4])
    assert state.commits[5] == replace(truth.commits[5], parent=4, quarantined=True)
    is_stale(root)
    goes_on(root, state)


def test_the_newest_commit_is_latest_if_a_person_says_so(root: SmallRoot) -> None:
    truth = root.log.state
    damage(root, [5])
    state = repaired(root, truth.commits[5].folder)
    assert (state.commits, state.head) == (truth.commits, 5)
    is_stale(root)
    goes_on(root, state)


def test_a_save_that_was_never_committed_is_told_from_the_one_that_may_have_been(root: SmallRoot) -> None:
    """Steps 30 and 40 are committed, 50 was given up by the entry that can't be read."""
    folder = save_whole(root, 50)
    root.log.void(root.claim, "given up", folder)
    damage(root, [6])
    state = repaired(root)
    assert (state.head, state.commits[6].folder, state.commits[6].quarantined) == (5, folder, True)


def test_of_two_saves_for_one_slot_neither_is_proven_and_both_are_kept(root: SmallRoot) -> None:
    truth = root.log.state
    stray = save_whole(root, 35)
    damage(root, [4])
    state = repaired(root)
    assert (state.tail, state.head, state.commits[5].parent) == (7, 5, 2)
    kept = {each.folder for each in state.commits.values() if each.quarantined}
    assert kept == {truth.commits[4].folder, stray}
    with pytest.raises(DamagedEntryError, match="marked as lost"):
        Log(root.store, patience=IMPATIENT).entry(6)
    is_stale(root)
    goes_on(root, state)


def test_a_save_that_had_not_come_to_its_end_is_garbage(root: SmallRoot) -> None:
    stray = root.give_up(35)
    damage(root, [4])
    state = repaired(root)
    assert state.commits == root.log.state.commits
    goes_on(root, state)
    assert not any(path.startswith(stray) for path in root.contents())


def test_two_saves_for_two_slots_are_both_kept_apart(root: SmallRoot) -> None:
    root.save(50)
    truth = root.log.state
    damage(root, [4, 5])
    state = repaired(root)
    assert (state.head, [each.slot for each in state.live]) == (6, [1, 2, 6])
    assert state.commits[6].parent == 2
    assert {unlike(each) for each in state.commits.values()} == {
        unlike(each) for each in truth.commits.values()
    }
    goes_on(root, state)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_begin_is_proven_by_the_entries_after_it_but_for_its_owner(root: SmallRoot, how: str) -> None:
    truth = root.log.state
    damage(root, [3], how)
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    assert truth.owner is not None
    assert state.owner == replace(truth.owner, restart_attempt=0)
    is_stale(root)
    goes_on(root, state)


def test_a_begin_that_went_back_is_proven_by_the_commit_after_it(root: SmallRoot) -> None:
    root.begin(2, base=2)
    root.save(21)
    truth = root.log.state
    assert (truth.commits[7].parent, truth.head) == (2, 7)
    damage(root, [6])
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)


def test_a_begin_as_the_newest_entry_loses_what_it_said(root: SmallRoot) -> None:
    truth = root.log.state
    root.begin(2, base=2)
    damage(root, [6])
    assert planned(root.store).rebuilt.doubts == (
        "slot 6: no later entry tells what it was, perhaps the latest commit",
    )
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
    is_stale(root)
    goes_on(root, state)


def test_the_claim_of_a_save_shows_that_a_begin_is_lost(root: SmallRoot) -> None:
    """Both the begin and the commit after it can't be read: the folder's name has the claim."""
    root.begin(2)
    record = root.save(50)
    damage(root, [6, 7])
    state = repaired(root)
    assert (state.head, state.commits[7].folder, state.commits[7].quarantined) == (5, record.folder, True)
    is_stale(root)


@pytest.mark.parametrize("how", DAMAGES)
def test_an_index_inside_a_claim_is_rebuilt(root: SmallRoot, how: str) -> None:
    for number in range(10):
        root.log.void(root.claim, "nothing to save", f"{number}/3-{number:032x}")
    record = root.save(50)
    root.log.mark_restored(root.claim, record.slot)
    truth = root.log.state
    assert truth.index == record.slot == 16
    damage(root, [16], how)
    state = repaired(root)
    assert (state.commits, state.head, state.owner) == (truth.commits, truth.head, truth.owner)
    goes_on(root, state)


def test_an_index_far_below_the_newest_is_not_needed(root: SmallRoot) -> None:
    damage(root, [0, 1])
    assert Log(root.store, patience=IMPATIENT).open() == root.log.state
    plan = planned(root.store)
    assert (plan.is_needed, sorted(plan.log.faults)) == (False, [0, 1])
    root.save(50)


def test_a_gap_below_the_newest_index_is_marked_and_nothing_is_in_doubt(root: SmallRoot) -> None:
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


@pytest.mark.parametrize("how", DAMAGES)
def test_the_first_entry_of_a_log_without_another_index(how: str) -> None:
    root = SmallRoot(f"memory://{secrets.token_hex(8)}")
    root.begin()
    root.save(10)
    root.save(20)
    root.log.mark_restored(root.claim, 1)
    truth = root.log.state
    damage(root, [0], how)
    state = repaired(root)
    assert (state.commits, state.head, state.root) == (truth.commits, truth.head, truth.root)
    assert state.owner is None
    is_stale(root)
    goes_on(root, state)


def test_a_log_of_which_nothing_can_be_read(root: SmallRoot) -> None:
    damage(root, range(6), "empty")
    newest = root.log.state.commits[5].folder
    state = repaired(root)
    assert (state.head, state.live, len(state.commits)) == (None, (), 4)
    assert state.root != root.log.state.root
    with pytest.raises(RestoreError, match="no latest one"):
        Log(root.store, patience=IMPATIENT).begin()
    # A person knows which is the latest: it is chosen by damaging nothing more than is damaged already.
    again = copy_before(root, 6)
    state = repaired(again, newest)
    assert state.latest is not None
    assert state.latest.folder == newest
    goes_on(again, state)


def test_several_at_once_and_a_repair_of_the_repair(root: SmallRoot) -> None:
    truth = root.log.state
    damage(root, [3, 4], "empty")
    state = repaired(root)
    assert (state.commits.keys(), state.head) == (truth.commits.keys(), 5)
    root.claim = Log(root.store).begin(pod_identity(restart_attempt=2))
    root.log.open()
    root.save(50)
    damage(root, [6, 7])
    again = repaired(root)
    assert again.head == 8
    assert {unlike(each) for each in again.live} >= {unlike(truth.commits[slot]) for slot in (1, 2, 5)}
    goes_on(root, again)


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


def test_a_log_of_a_newer_release_is_left_alone(root: SmallRoot) -> None:
    damage(root, [4])
    root.change(slot_path(5), b'{"format":3}')
    with pytest.raises(LogFormatError, match="has format 3"):
        planned(root.store)
