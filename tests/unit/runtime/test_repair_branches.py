"""Repairing a log with a branch: the line that it has left behind stays live, whatever of the branch can't be read."""

import pytest
from store_parts.damaged_root import damage, goes_on, is_stale, repaired, save_whole, two_starts

from stepkeeper.log import LogState, indexes
from stepkeeper.testing.checkpoints import SmallRoot
from stepkeeper.testing.pod import pod_identity


@pytest.fixture(autouse=True)
def _sparse_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put no index behind the damage that would tell what is lost."""
    monkeypatch.setattr(indexes, "_INTERVAL", 16)


OLD = [1, 2, 4, 5]
"""The commits of the line before: steps 10 to 40."""


@pytest.fixture
def root() -> SmallRoot:
    """A root with a start that restored nothing. Its slots: 6 begin, 7 begins a branch, 8 and 9 steps 1 and 2."""
    root = two_starts()
    root.begin(2)
    root.claim = root.log.begin(pod_identity(restart_attempt=2), branch=True, after=root.claim)
    root.save(1)
    root.save(2)
    return root


def line_of(state: LogState) -> list[int]:
    return [record.slot for record in state.line]


def live_in(state: LogState) -> list[int]:
    return [record.slot for record in state.live]


@pytest.mark.parametrize("slots", [[7], [8], [6, 8], [6, 7]])
def test_what_is_proven_of_a_branch_is_apart_from_the_line_before(root: SmallRoot, slots: list[int]) -> None:
    truth = root.log.state
    damage(root, slots)
    state = repaired(root)
    assert state.commits == truth.commits
    assert line_of(state) == [9, 8]
    is_stale(root)
    goes_on(root, state)


def test_behind_a_first_commit_that_is_not_proven_the_branch_is_apart_too(root: SmallRoot) -> None:
    """Two saves may have been the branch's first commit."""
    save_whole(root, 3)
    damage(root, [8])
    state = repaired(root)
    assert line_of(state) == [9]
    assert live_in(state) == [*OLD, 9]
    goes_on(root, state)


@pytest.mark.parametrize("adopts", [False, True])
def test_without_a_commit_that_can_be_read_the_line_before_is_the_latest(
    root: SmallRoot, adopts: bool
) -> None:
    truth = root.log.state
    damage(root, [8, 9])
    state = repaired(root, truth.commits[9].folder if adopts else None)
    assert live_in(state) == [*OLD, *([9] if adopts else [])]
    assert line_of(state) == ([9] if adopts else [5, 4, 2, 1])
    assert not state.branching
    goes_on(root, state)


def forgetful_start_that_gave_up_a_save() -> SmallRoot:
    """Make a root. Its slots: 6 begin, 7 begins a branch, 8 gives up a save."""
    root = two_starts()
    root.begin(2)
    root.claim = root.log.begin(pod_identity(restart_attempt=2), branch=True, after=root.claim)
    root.log.void(root.claim, "given up", f"1/{root.claim.slot}-{'ab' * 16}")
    return root


def test_a_branch_that_had_no_commit_yet_is_none() -> None:
    root = forgetful_start_that_gave_up_a_save()
    damage(root, [8])
    state = repaired(root)
    assert line_of(state) == [5, 4, 2, 1]
    assert not state.branching
    goes_on(root, state)


def test_a_claim_whose_begin_cannot_be_read_condemns_nothing_by_a_commit_without_a_parent() -> None:
    root = forgetful_start_that_gave_up_a_save()
    root.save(1)
    truth = root.log.state
    damage(root, [7])
    state = repaired(root)
    assert state.commits == truth.commits
    assert line_of(state) == [9]
    goes_on(root, state)
