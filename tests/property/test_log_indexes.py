"""Logs opened from their indexes: as if every entry had been read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from unittest import mock

import hypothesis.strategies as st
from hypothesis import Phase, given, settings
from thoroughness import scaled

from stepkeeper.log import Claim, ForeignBase, Log, LogState, ManifestRef
from stepkeeper.log.entries import VoidEntry
from stepkeeper.log.replay import apply, entry_for
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.pod import pod_identity

IMPATIENT = Patience(total_s=0, sleep=lambda _: None)
ACTIONS = (
    "save", "save", "save", "save", "begin", "other job", "go back", "legacy", "branch", "delete", "delete half",
    "delete abandoned", "quarantine", "restored", "void",
)  # fmt: skip
seeds = st.integers(0, 2**32)
sizes = st.sampled_from([1, 2, 3, 16])


@contextmanager
def indexes_every(interval: int) -> Iterator[None]:
    with mock.patch("stepkeeper.log.replay._INTERVAL", interval):
        yield


class Writer:
    """A job that does all that a log can tell of."""

    def __init__(self) -> None:
        self.bucket = MemoryBucket()
        self.log = Log(MemoryStore(self.bucket))
        self.claim: Claim = self.log.begin()
        self.starts = 0
        self.states = [self.log.state]

    def do(self, action: str, number: int) -> None:
        log, state = self.log, self.log.state
        line = [record.slot for record in state.line]
        some = line[number % len(line)] if line else -1
        match action:
            case "save":
                self._save(number)
            case "begin":
                self._begin(uid="a")
            case "other job":
                self._begin(uid=f"job {number % 4}")
            case "go back" if line:
                self._begin(uid="a", base=some)
            case "legacy" if not state.commits:
                self._begin(uid="a", base=ForeignBase(step=5, folder="5"))
            case "branch":
                self.claim = log.begin(branch=True, take_over=True)
            case "delete" if some not in (-1, state.head):
                log.delete(self.claim, lambda _: [some])
            case "delete half" if len(line) > 1:
                log.delete(self.claim, lambda _: line[1 + len(line) // 2 :] or line[1:])
            case "delete abandoned" if beside := [each.slot for each in state.live if each.slot not in line]:
                log.delete(self.claim, lambda _: beside[:number])
            case "quarantine" if line:
                log.quarantine(self.claim, some, "read bad")
            case "restored" if line:
                log.mark_restored(self.claim, some)
            case "void":
                log.void(self.claim, "given up", f"x{len(self.states)}")
            case _:
                return
        if len(self.states) <= log.state.tail:
            self.states.append(log.state)

    def _save(self, number: int) -> None:
        slot = self.log.state.tail + 1
        self.log.commit(
            self.claim,
            step=number,
            folder=f"{number}/{self.claim.slot}-{slot:032x}",
            size_bytes=slot,
            manifest=ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=slot),
            metrics={"loss": f"0.{number}"} if number % 5 == 0 else None,
        )

    def _begin(self, *, uid: str, base: int | ForeignBase | None = None) -> None:
        self.starts += 1
        identity = replace(pod_identity(restart_attempt=self.starts), job=uid, job_uid=uid)
        scratch = base is None and self.log.state.head is None
        self.claim = self.log.begin(
            identity, base=base, scratch=scratch, take_over=True, host=f"host {self.starts}"
        )


def told(seed: int) -> Writer:
    """Let a job do things at random: lists that hypothesis draws are too short for an index."""
    random = Random(seed)
    writer = Writer()
    length = random.randrange(30, 90)
    while writer.log.state.tail < length:
        writer.do(random.choice(ACTIONS), random.randrange(100))
    return writer


def opened(bucket: MemoryBucket) -> LogState:
    return Log(MemoryStore(bucket), patience=IMPATIENT).open()


def go_on(states: list[LogState], entries: int = 40) -> None:
    """Wherever each of these states was read from, they go on with the same bytes."""
    for number in range(entries):
        bytes_of = set()
        for at, state in enumerate(states):
            body = VoidEntry(folder=f"x{number}", reason="")
            entry = entry_for(state, body, claim=state.claim, nonce=f"{number:032x}")
            states[at] = apply(state, state.tail + 1, entry)
            bytes_of.add(entry.to_json())
        assert len(bytes_of) == 1


@settings(max_examples=scaled(30), phases=[Phase.generate])
@given(seed=seeds, size=sizes)
def test_from_any_index_a_log_opens_as_if_all_was_read(seed: int, size: int) -> None:
    with indexes_every(size):
        writer = told(seed)
        part = MemoryBucket()
        for slot, truth in enumerate(writer.states):
            part.objects[slot_path(slot)] = writer.bucket.objects[slot_path(slot)]
            assert opened(part) == truth
        go_on([writer.log.state, opened(part)])


@settings(max_examples=scaled(30), phases=[Phase.generate])
@given(seed=seeds, size=sizes)
def test_nothing_below_the_newest_index_is_read(seed: int, size: int) -> None:
    with indexes_every(size):
        writer = told(seed)
        for slot in range(writer.log.state.index):
            writer.bucket.objects[slot_path(slot)] = b""
        assert opened(writer.bucket) == writer.log.state
