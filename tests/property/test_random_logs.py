"""Random logs: opened from any index as if all was read; damaged, a repair loses nothing and makes up nothing."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings
from thoroughness import scaled

from stepkeeper.checkpoint.finishing import finish_checkpoint
from stepkeeper.cli.blocks import verify_commit
from stepkeeper.errors import DamagedEntryError, FencedError, LogGapError
from stepkeeper.log import CommitRecord, ForeignBase, Log, LogState
from stepkeeper.log.entries import VoidEntry
from stepkeeper.log.replay import apply_entry, entry_for
from stepkeeper.log.tail import slot_path
from stepkeeper.repair.repairing import Plan, carry_out, plan_repair
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.checkpoints import SmallRoot, save_small, write_small
from stepkeeper_testing.memory import MemoryBucket, MemoryStore
from stepkeeper_testing.pod import pod_identity

IMPATIENT: Final = Patience(total_s=0, sleep=lambda _: None)
_ROOTS: Final = itertools.count()
ACTIONS: Final = (
    *("save", "save", "save", "save", "begin", "go back", "delete", "delete data", "delete half"),
    *("quarantine", "restored", "void"),
)
OF_THE_LOG: Final = (*ACTIONS, "other job", "legacy", "branch", "delete abandoned")
OF_DATA: Final = (*ACTIONS, "give up whole", "give up")


@dataclass
class Job:
    """A job that does all that a log can tell of, and what its root truly is."""

    root: SmallRoot = field(default_factory=lambda: SmallRoot(f"memory://random-{next(_ROOTS)}"))
    starts: int = 0
    step: int = 0
    states: list[LogState] = field(default_factory=list)
    """After each slot."""

    def __post_init__(self) -> None:
        self.root.begin()
        self.states.append(self.root.log.state)

    @property
    def truth(self) -> LogState:
        return self.states[-1]

    def do(self, action: str, number: int) -> None:
        root, log, state = self.root, self.root.log, self.root.log.state
        line = [record.slot for record in state.line]
        some = line[number % len(line)] if line else -1
        self.step += 1
        match action:
            case "save":
                metrics = {"loss": f"0.{number}"} if number % 5 == 0 else None
                save_small(log, root.store, root.claim, self.step, metrics=metrics)
            case "begin":
                self._begin()
            case "other job":
                self._begin(job=f"job {number % 4}")
            case "go back" if line:
                self._begin(base=some)
            case "legacy" if not state.commits:
                self._begin(base=ForeignBase(step=5, folder="5"))
            case "branch":
                root.claim = log.begin(branch=True, take_over=True)
            case "delete" | "delete data" if some not in (-1, state.head):
                (record,) = log.delete(root.claim, lambda _: [some])
                if action == "delete data":
                    sweep(root.store, [Garbage(folder=record.folder, slot=record.slot)])
            case "delete half" if len(line) > 1:
                log.delete(root.claim, lambda _: line[1 + len(line) // 2 :] or line[1:])
            case "delete abandoned" if beside := [each.slot for each in state.live if each.slot not in line]:
                log.delete(root.claim, lambda _: beside[:number])
            case "quarantine" if line:
                log.quarantine(root.claim, some, "read bad")
            case "restored" if line:
                log.mark_restored(root.claim, some)
            case "void":
                log.void(root.claim, "given up", root.give_up(self.step))
            case "give up whole":
                finish_checkpoint(root.store, write_small(root.store, root.claim, self.step)[0], [])
            case "give up":
                root.give_up(self.step)
            case _:
                return
        self.states += [log.state] if log.state.tail >= len(self.states) else []

    def _begin(self, *, job: str = "a", base: int | ForeignBase | None = None) -> None:
        self.starts += 1
        identity = replace(pod_identity(restart_attempt=self.starts), job=job, job_uid=job)
        scratch = base is None and self.truth.head is None
        self.root.claim = self.root.log.begin(identity, base=base, scratch=scratch, take_over=True)


def opened(bucket: MemoryBucket) -> LogState:
    return Log(MemoryStore(bucket), patience=IMPATIENT).open()


def long_log(seed: int) -> tuple[Job, MemoryBucket]:
    """Let a job do things at random: lists that hypothesis draws are too short for an index."""
    random, job = Random(seed), Job()
    length = random.randrange(30, 90)
    while job.truth.tail < length:
        job.do(random.choice(OF_THE_LOG), random.randrange(100))
    bucket = MemoryBucket()
    bucket.objects.update(job.root.contents())
    return job, bucket


def bytes_of_next(state: LogState, number: int) -> tuple[LogState, bytes]:
    entry = entry_for(
        state, VoidEntry(folder=f"x{number}", reason=""), claim=state.claim, nonce=f"{number:032x}"
    )
    return apply_entry(state, state.tail + 1, entry), entry.to_json()


@settings(max_examples=scaled(30), phases=[Phase.generate])
@given(seed=st.integers(0, 2**32), interval=st.sampled_from([1, 2, 3, 16]))
def test_from_any_index_a_log_opens_as_if_all_was_read(seed: int, interval: int) -> None:
    with mock.patch("stepkeeper.log.replay._INTERVAL", interval):
        job, bucket = long_log(seed)
        part = MemoryBucket()
        for slot, truth in enumerate(job.states):
            part.objects[slot_path(slot)] = bucket.objects[slot_path(slot)]
            assert opened(part) == truth
        # Nothing below the newest index is read.
        for slot in range(job.truth.index):
            bucket.objects[slot_path(slot)] = b""
        ours, theirs = job.truth, opened(bucket)
        assert ours == theirs
        for number in range(40):
            ours, written = bytes_of_next(ours, number)
            theirs, as_well = bytes_of_next(theirs, number)
            assert written == as_well


@dataclass(frozen=True, slots=True)
class Hit:
    place: float
    """Where in the log, from 0 to 1."""

    how: str


hits = st.lists(
    st.builds(Hit, st.floats(0, 1), st.sampled_from(["flip", "cut", "empty", "gone"])), min_size=1, max_size=4
)


def damage(root: SmallRoot, tail: int, found: Iterable[Hit]) -> None:
    """Damage the log. The last slot is never emptied: nothing would show that it ever was there."""
    slots = set[int]()
    for hit in found:
        slot = round(hit.place * tail)
        if slot in slots or (hit.how == "gone" and slot == tail):
            continue
        slots.add(slot)
        data = root.store.read(slot_path(slot)).ljust(40, b" ")
        bad = {
            "flip": data[:30] + bytes([data[30] ^ 2]) + data[31:],
            "cut": data[: len(data) // 2],
            "empty": b"",
        }
        root.change(slot_path(slot), bad.get(hit.how))


def bare(record: CommitRecord) -> CommitRecord:
    """What of a commit neither its line nor an unreadable entry after it can change."""
    return replace(record, parent=None, legacy=None, verified=False, quarantined=False)


def check_nothing_lost(job: Job, plan: Plan, state: LogState) -> None:
    """What an entry that can be read tells of, and no entry has ended, is live; HEAD is right where it is known."""
    live = {each.slot for each in state.live}
    for record in job.truth.live:
        if record.slot not in plan.faults:
            assert bare(state.commits[record.slot]) == bare(record)
            assert record.slot in live
        # Another one's data isn't lost either, and is named.
        assert record.folder in {each.folder for each in state.commits.values()}
    head = job.truth.head
    if job.truth.tail not in plan.faults and (head is None or head in live):
        assert state.head == head


def check_nothing_made_up(job: Job, plan: Plan, state: LogState) -> None:
    """What is live is whole; if an entry had ended it, that one can't be read, or its own entry can't."""
    committed = {record.folder: slot for each in job.states for slot, record in each.commits.items()}
    for record in state.live:
        assert not verify_commit(job.root.store, record, patience=IMPATIENT).bad
        if record.folder in set(committed) - {each.folder for each in job.truth.live}:
            slot = committed[record.folder]
            lives = [slot in {each.slot for each in state.live} for state in job.states]
            ended = lives.index(False, lives.index(True))
            assert {slot, ended} & set(plan.faults)
        assert record.parent is None or not state.commits[record.parent].quarantined


def check_goes_on(job: Job, state: LogState) -> None:
    """The writer from before is stale, and the next start saves; a collection takes nothing that is named."""
    root = job.root
    with pytest.raises(FencedError):
        root.log.void(root.claim, "no reason", "1/0-x")
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
    actions=st.lists(st.tuples(st.sampled_from(OF_DATA), st.integers(0, 99)), min_size=1, max_size=28),
    found=hits,
    again=hits,
    interval=st.sampled_from([1, 2, 3, 8, 16]),
)
def test_a_repair_loses_nothing_and_makes_up_nothing(
    actions: list[tuple[str, int]], found: list[Hit], again: list[Hit], interval: int
) -> None:
    with mock.patch("stepkeeper.log.replay._INTERVAL", interval):
        check_damage(actions, found, again)


def check_damage(actions: list[tuple[str, int]], found: list[Hit], again: list[Hit]) -> None:
    job = Job()
    store = job.root.store
    for action, number in actions:
        job.do(action, number)
    damage(job.root, job.truth.tail, found)
    before = job.root.contents()
    plan = plan_repair(store, patience=IMPATIENT)
    assert job.root.contents() == before
    if not plan.is_needed:
        assert Log(store, patience=IMPATIENT).open() == job.truth
        return
    with pytest.raises((DamagedEntryError, LogGapError)):
        Log(store, patience=IMPATIENT).open()
    carry_out(store, Log(store), plan, "a test", patience=IMPATIENT)
    after = job.root.contents()
    assert {path: after[path] for path in before} == before
    state = Log(store, patience=IMPATIENT).open()
    check_nothing_lost(job, plan, state)
    check_nothing_made_up(job, plan, state)
    check_goes_on(job, state)
    # Once more: whatever is damaged then, a repair ends with a log that opens.
    damage(job.root, Log(store, patience=IMPATIENT).open().tail, again)
    plan = plan_repair(store, patience=IMPATIENT)
    if plan.is_needed:
        carry_out(store, Log(store), plan, "a test", patience=IMPATIENT)
    Log(store, patience=IMPATIENT).open()
