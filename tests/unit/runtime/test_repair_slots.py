"""Which save a repair counts as the commit of which lost slot, and which ones it keeps aside.

Each row tells what a job did: `100` is a commit of that step, `+150` a whole save that isn't committed, `^150` one
that the log gives up, `-1` deletes the commit of slot 1, `!3` condemns one, `*1` is a proof that one was restored.
Slot 0 is the begin, and each of the others but `+` takes the next one.
"""

import secrets
from dataclasses import replace
from functools import partial

import pytest
from store_parts.damaged_root import IMPATIENT, damage, goes_on, planned, repaired, save_whole

from stepkeeper.cli.blocks import verify_commit
from stepkeeper.errors import LogFormatError, RestoreError
from stepkeeper.log import Log, LogState
from stepkeeper.log.tail import slot_path
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.retention.pins import Pin, put_pin
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.pod import pod_identity

TO_INDEX = " ".join(str(step) for step in range(300, 2000, 100))
"""Commits to slot 19, from slot 3 on; the newest index is in slot 16."""


def chosen(slot: int, _: LogState) -> list[int]:
    return [slot]


def made(story: str) -> SmallRoot:
    """Make a root whose job did this."""
    root = SmallRoot(f"memory://{secrets.token_hex(8)}")
    root.begin()
    for word in story.split():
        number = int(word.lstrip("+^-!*"))
        match word[0]:
            case "+":
                save_whole(root, number)
            case "^":
                root.log.void(root.claim, "given up", save_whole(root, number))
            case "-":
                root.log.delete(root.claim, partial(chosen, number))
            case "!":
                root.log.quarantine(root.claim, number, "read bad")
            case "*":
                root.log.mark_restored(root.claim, number)
            case _:
                root.save(number)
    return root


def steps(state: LogState) -> tuple[int | None, list[int]]:
    """Return the step of HEAD, and those of quarantined commits."""
    head = None if state.latest is None else state.latest.step
    return head, [record.step for record in state.commits.values() if record.quarantined]


@pytest.mark.parametrize(
    ("story", "slots", "head", "aside"),
    [
        pytest.param("100 200 -1 400", [1, 4], 400, [100], id="deleted, its data still there; and HEAD"),
        pytest.param(f"100 200 -1 {TO_INDEX}", [1, 19], 1900, [100], id="the same below the newest index"),
        pytest.param(f"100 ^150 {TO_INDEX}", [2, 19], 1900, [150], id="given up below the newest index"),
        pytest.param("100 *1 200 300", [2, 4], 300, [], id="no commit's slot, and HEAD"),
        pytest.param("100 *1 300", [2, 3], 300, [], id="the same without a commit between"),
        pytest.param("100 +250 300", [2], 300, [250], id="never committed, and HEAD"),
        pytest.param("100 *1 200 !3", [2, 3], 100, [200], id="condemned"),
        pytest.param("100 200 300 !3", [2, 3], 200, [300], id="condemned, and the one before it"),
        pytest.param("100 200 !2 400", [2, 4], 400, [200], id="condemned, and a newer one"),
        pytest.param("100 200 300 -2", [2, 3], 300, [200], id="deleted by a later entry, and HEAD"),
        pytest.param(
            "100 200 *1 400 -2 600", [2, 3], 600, [200], id="deleted, another entry, and a commit after"
        ),
        pytest.param("100 200 *1 300 -2", [2, 3, 4], 300, [200], id="the same with another entry between"),
    ],
)
def test_head_is_the_newest_save_that_fits_and_what_was_ended_is_kept_aside(
    story: str, slots: list[int], head: int, aside: list[int]
) -> None:
    root = made(story)
    truth = root.log.state
    assert truth.latest is not None
    assert truth.latest.step == head
    damage(root, slots)
    state = repaired(root)
    assert steps(state) == (head, aside)
    assert {record.step for record in state.live} == {record.step for record in truth.live}
    goes_on(root, state, 9000)


def test_a_commit_whose_deletion_was_cut_short_is_not_live() -> None:
    root = made("100 200 300")
    folder = root.log.state.commits[1].folder
    root.log.delete(root.claim, lambda _: [1])
    root.change(f"{folder}/.metadata", None)
    damage(root, [4])
    assert planned(root.store).rebuilt.aside == {1: "part of it is deleted: .metadata is missing"}
    state = repaired(root)
    assert steps(state) == (300, [100])
    assert state.commits[2].parent is None
    assert not any(verify_commit(root.store, record, patience=IMPATIENT).bad for record in state.live)


def test_a_start_from_scratch_whose_commit_was_condemned_stays_an_error() -> None:
    root = made("100")
    root.claim = root.log.begin(pod_identity(restart_attempt=1), scratch=True)
    root.save(5)
    root.log.quarantine(root.claim, 3, "read bad")
    root.log.void(root.claim, "given up", f"1/2-{'0' * 32}")
    damage(root, [5])
    assert repaired(root).head is None
    with pytest.raises(RestoreError, match="no latest one"):
        Log(root.store).begin(pod_identity(restart_attempt=2))


@pytest.mark.parametrize(
    "path",
    [f"7/50-{'0' * 32}/junk", f"7/50-{'0' * 32}/.metadata", f"7/{10**9}-{'0' * 32}/manifest.0.json"],
)
def test_a_stray_object_is_no_save_of_a_later_claim(path: str) -> None:
    root = made("100")
    root.change(path, b"x")
    assert not planned(root.store).is_needed
    damage(root, [1])
    assert planned(root.store).marked == ()


def test_an_index_that_contradicts_itself_is_not_started_from() -> None:
    root = made(f"100 200 {TO_INDEX}")
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


@pytest.mark.parametrize("collects", ["sweep", "gc"])
def test_what_a_pin_of_a_lost_slot_may_hold_stays_whatever_commit_a_repair_put_there(collects: str) -> None:
    """The pin is of the commit of step 200, whose slot was 2; the repair gives it slot 3, and slot 2 to no commit."""
    root = made("100 200 *2")
    pinned = root.log.state.commits[2].folder
    put_pin(root.store, Pin(slot=2, nonce="a" * 32, holder="an evaluation"))
    damage(root, [2, 3])
    assert repaired(root).commits[3].folder == pinned
    root.log = Log(root.store, patience=IMPATIENT)
    root.begin(9)
    root.save(300)
    gone = root.log.delete(root.claim, lambda _: [3])
    if collects == "sweep":
        left = sweep(root.store, [Garbage(folder=each.folder, slot=each.slot) for each in gone])
        assert [each.folder for each in left] == [pinned]
    else:
        root.begin(10)
        assert pinned in {each.folder for each in gc(root.log, root.store, patience=IMPATIENT).pinned}
    assert any(path.startswith(pinned) for path in root.contents())
