"""How much time a notice leaves: to waits, to saves, to the end of the manager and to that of the process."""

import time
from types import SimpleNamespace
from typing import cast

import pytest

from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper.training import grace_period
from stepkeeper.training.grace_period import GracePeriod, launcher_grace_s
from stepkeeper.training.notices.watcher import Notice, NoticeWatcher


def grace_period_of(
    notice: Notice | None, grace_s: int | None, later: tuple[Notice, ...] = ()
) -> GracePeriod:
    notices = (*([notice] if notice else []), *later)
    return GracePeriod(grace_s, cast(NoticeWatcher, SimpleNamespace(notice=notice, notices=notices)))


@pytest.mark.parametrize(
    ("source", "grace_s", "progress_s", "left_s"),
    [
        ("sigterm", 30, 0.0, 30 - 1.5 - 10),
        ("sigterm", None, 0.0, 22 - 10),
        ("sigterm", None, 109.0, 22 - 1),
        ("call", None, 0.0, None),
        ("peer", 30, 0.0, 30 - 1.5 - 10),
    ],
)
def test_what_a_notice_of_ten_seconds_ago_leaves(
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    grace_s: int | None,
    progress_s: float,
    left_s: float | None,
) -> None:
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: 110.0))
    grace = grace_period_of(Notice(source=source, monotonic_s=100.0), grace_s)
    assert grace.wait_left_s(progress_s) == left_s
    assert grace_period_of(None, grace_s).wait_left_s(progress_s) is None


@pytest.mark.parametrize(
    ("notice", "rank", "left_s"),
    [
        (Notice(source="sigterm", monotonic_s=100.0), 0, 10 - 6),
        (Notice(source="peer", monotonic_s=100.0), 1, 8 - 6),
        (Notice(source="file", monotonic_s=90.0), 0, 0),
        (Notice(source="directive", monotonic_s=100.0, kills=False), 0, None),
    ],
)
def test_a_start_that_waits_for_others_is_left_soon_after_a_notice(
    monkeypatch: pytest.MonkeyPatch, notice: Notice, rank: int, left_s: float | None
) -> None:
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: 106.0))
    grace = grace_period_of(notice, 120)
    came: list[bool] = []
    later_s = grace.wait_left_s(0.0)
    with grace.starting(lambda: bool(came), rank=rank):
        assert grace.wait_left_s(0.0) == left_s
        came.append(True)
        assert grace.wait_left_s(0.0) == later_s
    assert grace.wait_left_s(0.0) == later_s


@pytest.mark.parametrize("source", ["directive", "peer", "sigterm"])
def test_a_later_notice_that_leaves_less_time_counts(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: 110.0))
    first, later = Notice(source=source, monotonic_s=100.0), Notice(source="preempted", monotonic_s=105.0)
    assert grace_period_of(first, 600, (later,)).left_s() == 15 - 1.5 - 5
    assert grace_period_of(first, 12, (later,)).left_s() == 12 - 1.5 - 10
    assert grace_period_of(later, 600, (first,)).left_s() == 15 - 1.5 - 5


@pytest.mark.parametrize(
    ("source", "left_s"), [("sigterm", 30 - 1.5 - 10), ("file", 300 - 1.5 - 10), ("peer", 300 - 1.5 - 10)]
)
def test_a_launcher_that_kills_sooner_than_the_pod_leaves_less_time(
    monkeypatch: pytest.MonkeyPatch, source: str, left_s: float
) -> None:
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: 110.0))
    told = SimpleNamespace(notices=(Notice(source=source, monotonic_s=100.0),))
    assert GracePeriod(300, cast(NoticeWatcher, told), launcher_s=30).left_s() == left_s
    assert GracePeriod(20, cast(NoticeWatcher, told), launcher_s=30).left_s() == 20 - 1.5 - 10


@pytest.mark.parametrize(
    ("environ", "grace_s"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, 30),
        ({"TORCHELASTIC_RUN_ID": "none", "STEPKEEPER_LAUNCHER": "1"}, None),
    ],
)
def test_torchrun_kills_unless_our_own_launcher_keeps_sigterm_from_it(
    environ: dict[str, str], grace_s: float | None
) -> None:
    assert launcher_grace_s(environ) == grace_s


def test_a_limit_is_cut_to_what_is_left_of_a_known_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: 110.0))
    notice = Notice(source="sigterm", monotonic_s=100.0)
    assert grace_period_of(notice, 30).bound_s(60.0) == 30 - 1.5 - 10
    assert grace_period_of(notice, 30).bound_s(10.0) == 10.0
    assert grace_period_of(notice, 5).bound_s(10.0) == 0.0
    assert grace_period_of(notice, None).bound_s(60.0) == 60.0
    assert grace_period_of(None, 30).bound_s(60.0) == 60.0


@pytest.mark.parametrize(("now_s", "overdue"), [(100.0, False), (129.6, False), (129.8, True)])
def test_a_process_is_ended_shortly_before_it_would_be_killed(
    monkeypatch: pytest.MonkeyPatch, now_s: float, overdue: bool
) -> None:
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: now_s))
    notice = Notice(source="sigterm", monotonic_s=100.0)
    assert grace_period_of(notice, 30).is_overdue(0.0) is overdue
    assert not grace_period_of(notice, None).is_overdue(now_s)
    assert not grace_period_of(None, 30).is_overdue(0.0)


@pytest.mark.parametrize("first", ["call", "peer", "directive"])
def test_a_signal_that_comes_after_another_notice_is_what_the_process_is_killed_for(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    now_s = 1010.0
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: now_s))
    before, signal = Notice(source=first, monotonic_s=100.0), Notice(source="sigterm", monotonic_s=1000.0)
    grace = grace_period_of(before, None, (signal,))
    assert grace_period_of(before, None).wait_left_s(0.0) is None
    assert grace.wait_left_s(0.0) == 22 - 10
    assert grace.closing_timeout_s() == 4.0
    assert not grace.is_overdue(0.0)
    now_s = 1027.1
    assert grace.is_overdue(0.0)
    assert not grace.is_overdue(1001.0)


def test_what_nobody_is_killed_for_has_no_end_until_somebody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grace_period, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    asked = Notice(source="call", monotonic_s=100.0, kills=False)
    peer = Notice(source="peer", monotonic_s=101.0, kills=False)
    grace = grace_period_of(asked, 30, (peer,))
    assert (grace.left_s(), grace.wait_left_s(0.0), grace.end_left_s()) == (None, None, None)
    assert not grace.is_overdue(0.0)
    told = Notice(source="sigterm", monotonic_s=990.0)
    assert grace_period_of(asked, 30, (peer, told)).left_s() == 30 - 1.5 - 10


@pytest.mark.parametrize(
    ("source", "has_started", "raised"),
    [
        ("sigterm", False, NoticeDeadlineError),
        ("sigterm", True, PeerLostError),
        ("peer", False, PeerLostError),
        (None, False, PeerLostError),
    ],
)
def test_a_rank_that_is_told_before_the_start_ends_as_told_also_where_another_goes_first(
    source: str | None, has_started: bool, raised: type[Exception]
) -> None:
    notice = None if source is None else Notice(source=source, monotonic_s=time.monotonic())
    grace = grace_period_of(notice, 600)
    with pytest.raises(raised, match="the store is gone"), grace.starting(lambda: has_started, rank=1):
        raise PeerLostError("the store is gone")
