"""A save's copies leave the devices as soon as they can, whatever the save before it is waiting for."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stepkeeper.companion.messages import Committed, Kind, Written
from stepkeeper.contract.wire import encode
from stepkeeper.save.report import SaveState
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.snapshot import Region, Snapshot
from stepkeeper_testing.saves import REF, record_of, saver_with

LONGEST_S = 10


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
        record = record_of(self.n_written, body["folder"])
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


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.full((2,), float(step))}


def test_the_devices_are_empty_while_the_save_before_is_written(
    moves: Moves, companion: SlowCompanion
) -> None:
    saves = saver_with(companion, max_pending=2)
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
    saves = saver_with(companion, max_pending=2)
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


def test_a_region_is_not_used_again_before_all_is_in_it(moves: Moves, companion: SlowCompanion) -> None:
    may_move = threading.Event()
    moves.by_step[1] = lambda _: cast(None, may_move.wait(LONGEST_S))
    companion.may_answer.set()
    saves = saver_with(companion, max_pending=2)
    begun = [saves.start_save(SaveRequest(step=step, state=state_of(step))) for step in (1, 2)]
    assert not companion.writing.wait(0.5), "nothing is written before all of it is in the region"
    with pytest.raises(TimeoutError, match="step 1 was still in flight"):
        saves.start_save(SaveRequest(step=3, state=state_of(3)), 0.0)
    may_move.set()
    begun.append(saves.start_save(SaveRequest(step=3, state=state_of(3))))
    assert [each.result(LONGEST_S).record.slot for each in begun] == [1, 2, 3]
    assert moves.moved == [1, 2, 3], "in the order of the saves"
    saves.close()
