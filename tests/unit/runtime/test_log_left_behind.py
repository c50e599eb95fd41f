"""A branch whose commits were all condemned: what it had left behind is gone on from, and only then."""

from collections.abc import Callable

import pytest

from stepkeeper.errors import RestoreError
from stepkeeper.log import Claim, ForeignBase, Log
from stepkeeper.log.left_behind import find_left_behind
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.memory import MemoryBucket, MemoryStore

CommitStep = Callable[..., int]


def branch(log: Log) -> Claim:
    return log.begin(branch=True, after=log.begin())


def test_the_next_start_goes_on_from_what_was_head_before_the_branch(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    old = [commit(log, log.begin(), step) for step in (99_000, 100_000)]
    claim = branch(log)
    torn = commit(log, claim, 1)
    log.quarantine(claim, torn, "block 3 of 9")
    assert log.state.head is None
    later = Log(MemoryStore(bucket))
    claim = later.begin()
    assert later.latest(claim) == later.state.commits[old[1]]
    assert later.state.commits[torn].quarantined
    new = commit(later, claim, 100_001)
    assert later.state.commits[new].parent == old[1]


def test_it_is_found_through_any_number_of_starts_on_the_branch(log: Log, commit: CommitStep) -> None:
    old = commit(log, log.begin(), 100)
    slots = [commit(log, branch(log), 1)]
    slots += [commit(log, log.begin(), step) for step in (2, 3, 4)]
    claim = log.begin()
    log.delete(claim, lambda _: slots[:2])
    for slot in reversed(slots[2:]):
        assert find_left_behind(log.state, log.entry) is None, "the branch has a live commit yet"
        log.quarantine(claim, slot, "bad")
    assert find_left_behind(log.state, log.entry) == old


def test_where_that_was_condemned_too_its_nearest_live_ancestor_is(log: Log, commit: CommitStep) -> None:
    old = [commit(log, log.begin(), step) for step in (10, 20, 30)]
    claim = branch(log)
    for slot in (commit(log, claim, 1), *reversed(old[1:])):
        log.quarantine(claim, slot, "bad")
    assert find_left_behind(log.state, log.entry) == old[0]
    log.quarantine(claim, old[0], "bad")
    assert find_left_behind(log.state, log.entry) is None
    with pytest.raises(RestoreError, match="no latest one"):
        log.begin()


def test_of_several_branches_each_falls_back_on_the_one_before(log: Log, commit: CommitStep) -> None:
    old = commit(log, log.begin(), 30)
    first = commit(log, branch(log), 20)
    claim = branch(log)
    log.quarantine(claim, commit(log, claim, 10), "bad")
    claim = log.begin()
    assert log.state.head == first
    log.quarantine(claim, first, "bad")
    claim = log.begin()
    assert log.state.head == old


def test_another_writers_step_is_fallen_back_on_too(log: Log, commit: CommitStep) -> None:
    theirs = ForeignBase(step=900, folder="900")
    log.begin(offer=lambda: theirs)
    claim = branch(log)
    log.quarantine(claim, commit(log, claim, 5), "bad")
    log.begin()
    assert (log.state.head, log.state.legacy) == (None, theirs)


def test_what_somebody_has_chosen_to_leave_is_not_gone_on_from(log: Log, commit: CommitStep) -> None:
    """Neither by starting from scratch, nor by going back; the error says how one chooses anew."""
    old = [commit(log, log.begin(), step) for step in (10, 20)]
    claim = log.begin(scratch=True)
    log.quarantine(claim, commit(log, claim, 1), "bad")
    with pytest.raises(RestoreError, match=rf"{old[1]} \(step 20\).*begin\(base=SEQUENCE, take_over=True\)"):
        log.begin()
    claim = log.begin(base=old[0])
    log.quarantine(claim, old[0], "bad")
    with pytest.raises(RestoreError, match="no latest one"):
        log.begin()
    assert log.begin(base=old[1], take_over=True)
    assert log.state.head == old[1]


def test_a_line_that_was_gone_back_to_is_no_branch_whatever_else_was_condemned(
    log: Log, commit: CommitStep
) -> None:
    claim = branch(log)
    old = [commit(log, claim, step) for step in (10, 20, 30)]
    claim = log.begin(base=old[0])
    log.quarantine(claim, old[2], "bad")
    log.quarantine(claim, old[0], "bad")
    assert log.state.commits[old[2]].parent == old[1]
    assert find_left_behind(log.state, log.entry) is None


def test_without_the_entry_that_tells_nothing_is_fallen_back_on(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    commit(log, log.begin(), 10)
    claim = branch(log)
    log.quarantine(claim, commit(log, claim, 1), "bad")
    while log.state.tail < 20:
        log.void(claim, "nothing to save", f"{log.state.tail}/0-x")
    bucket.objects[slot_path(claim.slot)] = b""
    assert find_left_behind(log.state, Log(MemoryStore(bucket)).entry) is None
