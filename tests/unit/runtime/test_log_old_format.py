"""A root whose log is of format 2, where most indexes hold only what has changed since an earlier one."""

import base64
import json
from pathlib import Path

import pytest
from store_parts.damaged_root import IMPATIENT, damage, goes_on, planned, repaired

from stepkeeper.cli.blocks import verify_commit
from stepkeeper.errors import DamagedEntryError
from stepkeeper.log import Log, LogState
from stepkeeper.log.replay import apply
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.retry import DEFAULT_PATIENCE
from stepkeeper_testing.checkpoints import SmallRoot

OLD_ROOT = Path(__file__).parents[2] / "data/log_format_2/root.json"
"""The objects of a root that the last release with that format wrote. Its indexes go back from slot 72 to 64 and 0."""


@pytest.fixture
def root() -> SmallRoot:
    root, objects = SmallRoot(), json.loads(OLD_ROOT.read_text())
    for path, text in objects["log"].items():
        root.change(path, text.encode())
    for path, text in objects["data"].items():
        root.change(path, base64.b64decode(text))
    return root


def test_it_opens_from_each_slot_as_if_every_entry_was_read(root: SmallRoot) -> None:
    log, truth = Log(root.store), LogState()
    later = {slot: root.store.read(slot_path(slot)) for slot in range(75)}
    for slot in later:
        root.change(slot_path(slot), None)
    for slot, data in later.items():
        root.change(slot_path(slot), data)
        truth = apply(truth, slot, log.entry(slot))
        assert Log(root.store).open() == truth
    assert (truth.head, [record.slot for record in truth.line]) == (73, [73, 71, 70, 66])
    assert {record.slot for record in truth.commits.values() if record.quarantined} == {56}


def test_its_commits_are_whole_and_it_is_gone_on_from(root: SmallRoot) -> None:
    before = root.log.open()
    for record in before.live:
        assert not verify_commit(root.store, record, patience=DEFAULT_PATIENCE).bad
    root.begin(3)
    root.save(370)
    after = Log(root.store).open()
    assert after == root.log.state
    assert after.index == 75, "the begin has a whole index"
    assert {*before.commits} < {*after.commits}


@pytest.mark.parametrize("slots", [[0], [8], [59], [63], [64], [63, 64]])
def test_the_entry_before_stands_in_for_one_below_its_newest_index_and_two_are_repaired(
    root: SmallRoot, slots: list[int]
) -> None:
    truth = root.log.open()
    damage(root, slots)
    if len(slots) == 1:
        assert Log(root.store, patience=IMPATIENT).open() == truth
        assert not planned(root.store).is_needed
        return
    with pytest.raises(DamagedEntryError, match="slot 64 of the log"):
        Log(root.store, patience=IMPATIENT).open()
    state = repaired(root)
    assert {record.slot for record in state.live} == {record.slot for record in truth.live}
    assert state.head == truth.head
    goes_on(root, state, 400)
