"""A log whose newest index goes on from older ones, some of them bad: what is known of it, and what is repaired."""

import logging
import secrets

import pytest
from store_parts.damaged_root import IMPATIENT, damage, goes_on, is_stale, planned, repaired

from stepkeeper.errors import DamagedEntryError, LogGapError
from stepkeeper.log import Log
from stepkeeper.log.tail import slot_path
from stepkeeper.testing.checkpoints import SmallRoot
from stepkeeper.testing.pod import pod_identity


@pytest.fixture
def root() -> SmallRoot:
    """A root of 45 commits. The entry in slot 45 stands on the indexes of slots 40, 32 and 0."""
    root = SmallRoot(f"memory://{secrets.token_hex(8)}")
    root.begin()
    for step in range(45):
        root.save(step)
    assert [link.base.slot for link in root.log.state.chain] == [0, 32, 40]
    return root


@pytest.mark.parametrize("how", ["flipped", "cut", "empty"])
@pytest.mark.parametrize("slot", [0, 32])
def test_a_bad_index_below_the_newest_is_not_needed_and_told(
    root: SmallRoot, caplog: pytest.LogCaptureFixture, slot: int, how: str
) -> None:
    damage(root, [slot], how)
    with caplog.at_level(logging.WARNING):
        assert Log(root.store, patience=IMPATIENT).open() == root.log.state
    assert f"{slot:08d}.json" in caplog.text
    assert not planned(root.store).is_needed
    goes_on(root, root.log.state)


def test_another_entry_in_the_place_of_an_index_is_not_taken_for_it(root: SmallRoot) -> None:
    """The object was put back from a copy of the root that had gone another way."""
    copy = SmallRoot(f"memory://{secrets.token_hex(8)}")
    for path, data in root.contents().items():
        if path < slot_path(20) or not path.startswith(slot_path(0).rpartition("/")[0]):
            copy.change(path, data)
    copy.begin(1)
    while copy.log.state.tail < 40:
        copy.save(1)
    root.change(slot_path(32), copy.contents()[slot_path(32)])
    assert Log(root.store, patience=IMPATIENT).open() == root.log.state


def test_neighbours_that_are_bad_are_repaired_and_all_commits_kept(root: SmallRoot) -> None:
    truth = root.log.state
    damage(root, [31, 32])
    with pytest.raises(DamagedEntryError, match="slot 32 of the log"):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert state.head == truth.head
    assert {record.folder for record in state.commits.values()} == {
        record.folder for record in truth.commits.values()
    }
    # Of slot 31 the later index tells nothing: there is one such slot, and one save.
    assert {slot: truth.commits[slot] for slot in state.commits} == dict(state.commits)
    is_stale(root)
    goes_on(root, state)


def test_a_repair_keeps_what_old_indexes_tell(root: SmallRoot) -> None:
    """Of slot 20 only the index of slot 32 tells, which that of slot 40 goes on from."""
    truth = root.log.state
    damage(root, [20, 44])
    assert repaired(root).commits == truth.commits


def test_a_gap_among_old_indexes_stops_a_reader_until_it_is_marked(root: SmallRoot) -> None:
    truth = root.log.state
    damage(root, [32], "gone")
    with pytest.raises(LogGapError, match=r"00000032\.json is gone"):
        Log(root.store, patience=IMPATIENT).open()
    assert repaired(root).commits == truth.commits


def test_nothing_stands_in_for_a_repair(root: SmallRoot) -> None:
    """All entries before it can be read here, but what a repair concludes is in none of them."""
    damage(root, [3], "gone")
    repaired(root)
    root.claim = root.log.begin(pod_identity(restart_attempt=1), take_over=True)
    for step in range(50, 70):
        root.save(step)
    truth, oldest = root.log.state, root.log.state.chain[0].base
    assert (oldest.slot, oldest.repair) == (46, True)
    damage(root, [46])
    with pytest.raises(DamagedEntryError, match="slot 46 of the log"):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert (state.commits, state.head) == (truth.commits, truth.head)
