"""Test how often a store is asked again: by the pauses, and no longer than a minute more where each try takes long."""

import time

import pytest

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.storage import retry
from stepkeeper.storage.retry import Patience


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_warnings", retry._Warnings())


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("try_s", "tries"), [(0.0, range(15, 40)), (30.0, range(4, 7)), (700.0, range(2, 3))]
)
def test_tries_end_in_time(monkeypatch: pytest.MonkeyPatch, try_s: float, tries: range) -> None:
    clock = Clock(monkeypatch)
    asked = []

    def ask() -> None:
        asked.append(clock.now_s)
        clock.pass_s(try_s)
        raise TransientStorageError("no answer")

    with pytest.raises(TransientStorageError):
        Patience(sleep=clock.pass_s).retry(ask)
    assert len(asked) in tries
    assert asked[-1] - asked[0] < max(90 + 60 + 8, try_s + 1)


def test_what_asking_again_doesn_t_help_is_raised_at_once() -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise StorageError("not allowed")

    with pytest.raises(StorageError, match="not allowed"):
        Patience(sleep=lambda _: None).retry(ask)
    assert asked == [1]


def test_a_store_that_gives_no_answer_for_a_while_is_warned_of_early_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    told_at_s: list[float] = []

    def ask() -> None:
        told_at_s.extend([clock.now_s - 1000] * (len(caplog.messages) - len(told_at_s)))
        raise TransientStorageError("503 for /root/x")

    with pytest.raises(TransientStorageError):
        Patience(sleep=clock.pass_s).retry(ask)
    assert 5 <= told_at_s[0] < 20
    assert len(told_at_s) in (2, 3)
    assert caplog.messages[0].endswith("and is asked again for up to 90 s: 503 for /root/x")


def test_a_store_that_answers_soon_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    answers = iter([TransientStorageError("503")] * 4)

    def ask() -> None:
        for error in answers:
            raise error

    Patience(sleep=clock.pass_s).retry(ask)
    assert caplog.messages == []
