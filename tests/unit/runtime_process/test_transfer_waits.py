"""A rank whose copies come slowly from its devices is waited for as long as they come, by itself and by the others."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import CompanionLostError, SaveError
from stepkeeper.save.persist import persist_save
from stepkeeper.save.snapshot import Region, Snapshot, SnapshotTaker, transfer
from stepkeeper.time_limits import TimeLimits
from stepkeeper_testing.saves import job_of

LIMIT_S = 1800.0
"""A transfer's by default."""


class Clock:
    """Goes on by what is waited."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Transfer(Future[None]):
    """Copies of which 100 bytes a second move until `stands_at_s`, and are there at `due_s`."""

    def __init__(self, clock: Clock, snapshot: Snapshot, stands_at_s: float, due_s: float) -> None:
        super().__init__()
        self.clock, self.snapshot, self.stands_at_s, self.due_s = clock, snapshot, stands_at_s, due_s

    @override
    def result(self, timeout: float | None = None) -> None:
        assert timeout is not None
        self.clock.now_s = min(self.due_s, self.clock.now_s + timeout)
        self.snapshot.moved_bytes = 100 * int(min(self.clock.now_s, self.stands_at_s))
        if self.clock.now_s < self.due_s:
            raise TimeoutError


class Told(SoloRankGroup):
    """A rank group that notes what this rank says of its progress."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = TimeLimits()  # type: ignore[misc]  # a rank group's own is final
        self.told_bytes: list[int] = []

    @override
    def heartbeat(self) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(self.told_bytes.append)


class NoCompanion:
    def claim_root(self, **_: object) -> Any:
        return SimpleNamespace(claim=SimpleNamespace(slot=0))

    def ensure_process(self) -> None:
        raise CompanionLostError("the transfer is over")


def outcome_of(
    monkeypatch: pytest.MonkeyPatch, *, stands_at_s: float, due_s: float
) -> tuple[Exception, Told, Clock]:
    clock, rank_group, region = Clock(), Told(), Region()
    monkeypatch.setattr(transfer, "time", clock)
    snapshot = SnapshotTaker(rank_group.ranks).take_snapshot({"step": 7}, region)
    job = job_of(snapshot, region, Transfer(clock, snapshot, stands_at_s, due_s))
    with pytest.raises((CompanionLostError, SaveError)) as raised:
        persist_save(job, cast(Companion, NoCompanion()), rank_group)
    return raised.value, rank_group, clock


def test_copies_that_come_slowly_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    error, rank_group, clock = outcome_of(monkeypatch, stands_at_s=3 * LIMIT_S, due_s=3 * LIMIT_S)
    assert isinstance(error, CompanionLostError), "the transfer was no failure"
    assert clock.now_s == 3 * LIMIT_S
    assert sum(rank_group.told_bytes) == pytest.approx(100 * 3 * LIMIT_S, rel=0.01)


def test_copies_that_come_no_more_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    error, _, clock = outcome_of(monkeypatch, stands_at_s=LIMIT_S / 2, due_s=10 * LIMIT_S)
    assert str(error) == "the copies of the state did not come from the devices: nothing came for 1800 s"
    assert clock.now_s == pytest.approx(1.5 * LIMIT_S, rel=0.01)
