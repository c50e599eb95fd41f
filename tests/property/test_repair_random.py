"""Random logs with random damage: a repair loses nothing that was committed, and makes live what is whole only."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from unittest import mock

import hypothesis.strategies as st
from hypothesis import given, settings
from thoroughness import scaled

from stepkeeper.checkpoint import finish_checkpoint
from stepkeeper.cli.blocks import verify_commit
from stepkeeper.errors import DamagedEntryError, FencedError, LogGapError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import Plan, carry_out, plan_repair
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot, save_small, write_small
from stepkeeper_testing.pod import pod_identity

IMPATIENT: Final = Patience(total_s=0, sleep=lambda _: None)
_ROOTS: Final = itertools.count()

ACTIONS: Final = (
    "save", "save", "save", "save", "begin", "go back", "delete", "delete half", "quarantine", "restored", "void",
    "give up whole", "give up",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hit:
    """Damage to one slot."""

    place: float
    """Where in the log, from 0 to 1."""

    how: str


hits = st.lists(
    st.builds(Hit, st.floats(0, 1), st.sampled_from(["flip", "cut", "empty", "gone"])), min_size=1, max_size=4
)
intervals = st.sampled_from([1, 2, 3, 8, 16])
"""Of the indexes."""


@dataclass
class Story:
    """A root, and what it truly was before it was damaged."""

    root: SmallRoot
    states: list[LogState]
    """The state after each slot."""

    @property
    def truth(self) -> LogState:
        return self.states[-1]


def picking(slot: int) -> Callable[[LogState], list[int]]:
    return lambda state: [slot]


def told(actions: list[str]) -> Story:
    """Let a job do all of this, one after the other."""
    root = SmallRoot(f"memory://random-{next(_ROOTS)}")
    root.begin()
    story = Story(root, [root.log.state])
    attempt = 0
    for step, action in enumerate(actions, 1):
        state = root.log.state
        line = [record.slot for record in state.line]
        match action:
            case "save":
                root.save(step)
            case "begin":
                attempt += 1
                root.begin(attempt)
            case "go back" if line:
                attempt += 1
                root.begin(attempt, base=line[-1])
            case "delete" | "delete half" if len(line) > 1:
                (record,) = root.log.delete(root.claim, picking(line[-1]))
                if action == "delete":
                    sweep(root.store, [Garbage(folder=record.folder, slot=record.slot)])
            case "quarantine" if len(line) > 1:
                root.log.quarantine(root.claim, line[0], "read bad")
            case "restored" if line:
                root.log.mark_restored(root.claim, line[0])
            case "void":
                root.log.void(root.claim, "given up", root.give_up(step))
            case "give up whole":
                finish_checkpoint(root.store, write_small(root.store, root.claim, step)[0], [])
            case "give up":
                root.give_up(step)
            case _:
                pass
        story.states += [root.log.state] if root.log.state.tail >= len(story.states) else []
    return story


def damage(story: Story, found: list[Hit]) -> set[int]:
    """Damage the log. The last slot is never emptied: nothing would show that it ever was there."""
    tail, slots = story.truth.tail, set()
    for hit in found:
        slot = round(hit.place * tail)
        if slot in slots or (hit.how == "gone" and slot == tail):
            continue
        data = story.root.store.read(slot_path(slot)).ljust(40, b" ")
        slots.add(slot)
        bad = {
            "flip": data[:30] + bytes([data[30] ^ 2]) + data[31:],
            "cut": data[: len(data) // 2],
            "empty": b"",
            "gone": None,
        }
        story.root.change(slot_path(slot), bad[hit.how])
    return slots


def bare(record: CommitRecord) -> CommitRecord:
    """What of a commit neither its line nor an unreadable entry after it can change."""
    return replace(record, parent=None, legacy=None, verified=False, quarantined=False)


def committed(story: Story) -> dict[int, CommitRecord]:
    """All commits that ever were, by slot."""
    return {slot: record for state in story.states for slot, record in state.commits.items()}


def check_nothing_lost(story: Story, plan: Plan, state: LogState) -> None:
    """What an entry that can be read tells of, and no entry has ended, is live."""
    for record in story.truth.live:
        if record.slot not in plan.faults:
            assert bare(state.commits[record.slot]) == bare(record)
            assert not state.commits[record.slot].quarantined
        # Another one's data isn't lost either, and is named.
        assert record.folder in {each.folder for each in state.commits.values()}


def check_nothing_made_up(story: Story, plan: Plan, state: LogState) -> None:
    """What is live is whole; if an entry had ended it, that one can't be read, or its own entry can't."""
    all_of_them = {record.folder: record.slot for record in committed(story).values()}
    for record in state.live:
        assert not verify_commit(story.root.store, record, patience=IMPATIENT).bad
        if record.folder in set(all_of_them) - {each.folder for each in story.truth.live}:
            slot = all_of_them[record.folder]
            assert {slot, _ended_by(story, slot)} & set(plan.faults)
        assert record.parent is None or not state.commits[record.parent].quarantined


def _ended_by(story: Story, commit: int) -> int:
    """Find the slot of the entry that deleted or quarantined a commit."""
    was_live = False
    for slot, state in enumerate(story.states):
        is_live = commit in {each.slot for each in state.live}
        if was_live and not is_live:
            return slot
        was_live = is_live
    raise AssertionError(f"commit {commit} was never ended")


def check_head(story: Story, plan: Plan, state: LogState) -> None:
    """HEAD is right if the last entry can be read and what it names is known."""
    head = story.truth.head
    if story.truth.tail not in plan.faults and (head is None or head in {each.slot for each in state.live}):
        assert state.head == head


def check_goes_on(story: Story, state: LogState) -> None:
    """The writer from before is stale, and the next start saves; a collection takes nothing that is named."""
    root = story.root
    try:
        root.log.commit(
            root.claim,
            step=1,
            folder="1/0-x",
            size_bytes=1,
            manifest=next(iter(committed(story).values())).manifest,
        ) if committed(story) else root.log.void(root.claim, "no reason", "1/0-x")
    except FencedError:
        pass
    else:
        raise AssertionError("a stale writer has appended")
    log = Log(root.store, patience=IMPATIENT)
    claim = log.begin(
        pod_identity(restart_attempt=99), base=state.head, scratch=state.head is None, take_over=True
    )
    assert save_small(log, root.store, claim, 1000).parent == state.head
    gc(log, root.store, patience=IMPATIENT)
    there = {path.rpartition("/")[0] for path in root.contents()}
    assert {record.folder for record in log.state.commits.values()} <= there
    assert Log(root.store, patience=IMPATIENT).open() == log.state


@settings(max_examples=scaled(150))
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=28),
    found=hits,
    again=hits,
    interval=intervals,
)
def test_random_damage(actions: list[str], found: list[Hit], again: list[Hit], interval: int) -> None:
    with mock.patch("stepkeeper.log.replay._INTERVAL", interval):
        check_damage(actions, found, again)


def check_damage(actions: list[str], found: list[Hit], again: list[Hit]) -> None:
    """Let a job do this, damage its log, repair it, damage it again and repair it again."""
    story = told(actions)
    damage(story, found)
    before = story.root.contents()
    plan = plan_repair(story.root.store, patience=IMPATIENT)
    assert story.root.contents() == before
    if not plan.is_needed:
        assert Log(story.root.store, patience=IMPATIENT).open() == story.truth
        return
    try:
        opened = Log(story.root.store, patience=IMPATIENT).open()
    except (DamagedEntryError, LogGapError):
        pass
    else:
        raise AssertionError(f"a repair isn't needed: {opened}")
    carry_out(story.root.store, Log(story.root.store), plan, "a test", patience=IMPATIENT)
    after = story.root.contents()
    assert {path: after[path] for path in before} == before
    state = Log(story.root.store, patience=IMPATIENT).open()
    check_nothing_lost(story, plan, state)
    check_nothing_made_up(story, plan, state)
    check_head(story, plan, state)
    check_goes_on(story, state)
    # Once more: whatever is damaged then, a repair ends with a log that opens.
    later = Story(story.root, [Log(story.root.store, patience=IMPATIENT).open()])
    damage(later, again)
    plan = plan_repair(story.root.store, patience=IMPATIENT)
    if plan.is_needed:
        carry_out(story.root.store, Log(story.root.store), plan, "a test", patience=IMPATIENT)
    Log(story.root.store, patience=IMPATIENT).open()
