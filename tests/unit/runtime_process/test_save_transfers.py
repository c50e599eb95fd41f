"""A save's copies leave the devices as soon as they can, whatever the save before it is waiting for."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stepkeeper.companion.messages import Committed, Kind, Written
from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract.wire import encode
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.error_codec import encode_error
from stepkeeper.errors import SaveError
from stepkeeper.log import CommitRecord, ManifestRef
from stepkeeper.save import report as save_report
from stepkeeper.save.report import SaveClock, SaveState
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.saver import Saver
from stepkeeper.save.snapshot import Region, Snapshot
from stepkeeper.storage.memory import MemoryStore
from stepkeeper_planners.geometry.layout import Ranks

LONGEST_S = 10
REF = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)


class SlowCompanion:
    """Commits all that it is asked to, and answers writes when it is let."""

    has_tier = False
    lost = False
    structure_key = None

    def __init__(self) -> None:
        self.writing = threading.Event()
        self.may_answer = threading.Event()
        self.n_written = 0

    def ensure_process(self) -> "SlowCompanion":
        return self

    def claim_root(self, **_: object) -> Any:
        return SimpleNamespace(claim=SimpleNamespace(slot=0))

    def send_request(self, kind: Kind, body: Any, fds: Any = (), *, timeout_s: float, **_: Any) -> Any:
        if kind is Kind.WRITE:
            self.writing.set()
            assert self.may_answer.wait(LONGEST_S)
            self.n_written += 1
            return encode(Written(size_bytes=1, manifest=REF))
        if kind is Kind.VOID:
            return {}
        record = CommitRecord(
            slot=self.n_written,
            claim=0,
            step=self.n_written,
            folder=body["folder"],
            size_bytes=1,
            manifest=REF,
        )
        return encode(Committed(record=record, uri=f"memory://bucket/{record.folder}"))

    def upkeep_of(self, _slot: int) -> Future[None]:
        return Future()


class Moves:
    """In place of what moves a snapshot from the devices. A step that nothing is said of moves at once."""

    def __init__(self) -> None:
        self.by_step: dict[int, Callable[[Snapshot], None]] = {}
        self.moved: list[int] = []
        self._changed = threading.Condition()

    def move(self, snapshot: Snapshot, region: Region) -> None:
        step = int(region.view_orders(snapshot.plan.orders)[0][0])
        try:
            if step in self.by_step:
                self.by_step[step](snapshot)
        finally:
            with self._changed:
                self.moved.append(step)
                self._changed.notify_all()

    def tried(self, step: int) -> bool:
        """Soon."""
        with self._changed:
            return self._changed.wait_for(lambda: step in self.moved, LONGEST_S)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    found = Moves()

    def transfer(snapshot: Snapshot, region: Region) -> None:
        found.move(snapshot, region)

    monkeypatch.setattr(Snapshot, "move_copies", transfer)
    return found


@pytest.fixture
def companion() -> Iterator[SlowCompanion]:
    found = SlowCompanion()
    yield found
    found.may_answer.set()


def saves_with(companion: SlowCompanion, rank_group: SoloRankGroup | None = None) -> Saver:
    return Saver(
        MemoryStore(),
        cast(Companion, companion),
        rank_group or SoloRankGroup(),
        Progress(lambda _: None),
        max_pending=2,
    )


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.full((2,), float(step))}


def test_the_devices_are_empty_while_the_save_before_is_written(
    moves: Moves, companion: SlowCompanion
) -> None:
    saves = saves_with(companion)
    first = saves.start_save(SaveRequest(step=1, state=state_of(1)))
    assert companion.writing.wait(LONGEST_S)
    second = saves.start_save(SaveRequest(step=2, state=state_of(2)))
    assert moves.tried(2)
    assert not first.done
    assert second.state is SaveState.TRANSFERRING
    companion.may_answer.set()
    assert [each.result(LONGEST_S).record.slot for each in (first, second)] == [1, 2]
    saves.close()


def test_what_cannot_be_moved_fails_its_own_save_in_its_turn(moves: Moves, companion: SlowCompanion) -> None:
    def refuse(_: Snapshot) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    moves.by_step[2] = refuse
    saves = saves_with(companion)
    first = saves.start_save(SaveRequest(step=1, state=state_of(1)))
    assert companion.writing.wait(LONGEST_S)
    second = saves.start_save(SaveRequest(step=2, state=state_of(2)))
    assert moves.tried(2)
    assert not second.done
    saves.raise_failure()
    with pytest.raises(TimeoutError, match="step 1 was still in flight"):
        saves.start_save(SaveRequest(step=3, state=state_of(3)), 0.0)
    companion.may_answer.set()
    assert first.result(LONGEST_S).record.slot == 1
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        second.result(LONGEST_S)
    saves.raise_failure()  # it was said
    assert saves.start_save(SaveRequest(step=3, state=state_of(3))).result(LONGEST_S).record.slot == 2
    saves.close()


class FirstOfTwo(SoloRankGroup):
    """Rank 0, whose other rank does as it does."""

    world_size = 2  # type: ignore[misc]  # SoloRankGroup's own is final
    ranks = Ranks(rank=0, world_size=2)  # type: ignore[misc]  # as above

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.votes: dict[str, Mapping[str, Any]] = {}
        self.threads: set[int] = set()

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:  # type: ignore[explicit-override]  # Python 3.11 has no typing.override
        self._note(name)
        return super().broadcast(name, value, timeout_s)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # type: ignore[explicit-override]  # as above
        self._note(name)
        self.votes[name] = value
        return super().gather(name, value, timeout_s) * 2

    def _note(self, name: str) -> None:
        if name.startswith("save/"):
            self.said.append(name)
            self.threads.add(threading.get_ident())


def test_the_ranks_talk_of_one_save_after_the_other_in_one_thread(
    moves: Moves, companion: SlowCompanion
) -> None:
    def refuse(_: Snapshot) -> None:
        raise SaveError("elements are lacking")

    moves.by_step[2] = refuse
    rank_group = FirstOfTwo()
    saves = saves_with(companion, rank_group)
    first = saves.start_save(SaveRequest(step=1, state=state_of(1)))
    assert companion.writing.wait(LONGEST_S)
    second = saves.start_save(SaveRequest(step=2, state=state_of(2)))
    assert moves.tried(2)
    assert rank_group.said == [f"save/0/{part}" for part in ("state", "same", "place")]
    companion.may_answer.set()
    first.result(LONGEST_S)
    with pytest.raises(SaveError, match="elements are lacking"):
        second.result(LONGEST_S)
    parts = ("state", "same", "place", "vote", "outcome")
    assert rank_group.said == [f"save/{number}/{part}" for number in (0, 1) for part in parts]
    assert rank_group.votes["save/1/vote"] == {"error": encode_error(SaveError("elements are lacking"))}
    assert len(rank_group.threads) == 1, "each thread has a client of its own"
    saves.close()


def test_what_will_not_be_moved_any_more_is_dropped_at_once(moves: Moves, companion: SlowCompanion) -> None:
    class Copy:
        """On a device."""

    copies: list[weakref.ref[Copy]] = []

    def fail(snapshot: Snapshot) -> None:
        copy, waiting = Copy(), Copy()
        copies.extend((weakref.ref(copy), weakref.ref(waiting)))
        snapshot.on_device.append(cast(Any, waiting))
        raise RuntimeError(f"{copy} could not be moved")

    moves.by_step[2] = fail
    saves = saves_with(companion)
    saves.start_save(SaveRequest(step=1, state=state_of(1)))
    assert companion.writing.wait(LONGEST_S)
    failed = saves.start_save(SaveRequest(step=2, state=state_of(2)))
    assert moves.tried(2)
    # The next one is moved after the one that failed has been dealt with.
    dealt_with = threading.Event()
    saves._pipeline._transfers.submit(dealt_with.set)
    assert dealt_with.wait(LONGEST_S)
    assert not failed.done
    assert [copy() for copy in copies] == [None, None]
    companion.may_answer.set()
    saves.close()


def test_a_region_is_not_used_again_before_all_is_in_it(moves: Moves, companion: SlowCompanion) -> None:
    may_move = threading.Event()
    moves.by_step[1] = lambda _: cast(None, may_move.wait(LONGEST_S))
    companion.may_answer.set()
    saves = saves_with(companion)
    begun = [saves.start_save(SaveRequest(step=step, state=state_of(step))) for step in (1, 2)]
    assert not companion.writing.wait(0.5), "nothing is written before all of it is in the region"
    with pytest.raises(TimeoutError, match="step 1 was still in flight"):
        saves.start_save(SaveRequest(step=3, state=state_of(3)), 0.0)
    may_move.set()
    begun.append(saves.start_save(SaveRequest(step=3, state=state_of(3))))
    assert [each.result(LONGEST_S).record.slot for each in begun] == [1, 2, 3]
    assert moves.moved == [1, 2, 3], "in the order of the saves"
    saves.close()


def test_the_end_waits_for_what_is_still_on_the_devices(moves: Moves, companion: SlowCompanion) -> None:
    may_move = threading.Event()
    moves.by_step[2] = lambda _: cast(None, may_move.wait(LONGEST_S))
    companion.may_answer.set()
    saves = saves_with(companion)
    begun = [saves.start_save(SaveRequest(step=step, state=state_of(step))) for step in (1, 2)]
    begun[0].result(LONGEST_S)
    assert not begun[1].done
    threading.Timer(0.05, may_move.set).start()
    saves.close()
    assert may_move.is_set()
    assert [each.result(0).record.slot for each in begun] == [1, 2]


def test_the_wait_for_the_save_before_is_no_part_of_moving_or_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 30.0, 100.0])
    monkeypatch.setattr(save_report, "time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = SaveClock()
    clock.mark_released()
    clock.mark_transferred()
    clock.mark_state(SaveState.WRITING)
    clock.mark_state(SaveState.COMMITTING)
    report = clock.build_report(7, size_bytes=1)
    parts = (report.stall_s, report.transfer_s, report.queue_s, report.persist_s, report.commit_s)
    assert parts == (1, 2, 7, 20, 70)
    assert report.duration_s == sum(parts)
