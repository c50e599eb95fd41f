"""How often a store is asked again: by the pauses, and no longer than a minute more where each try takes long."""

import random
import time
from collections.abc import Callable, Iterable

import pytest

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.storage import retry
from stepkeeper.storage.retry import Patience

Ask = Callable[..., list[float]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """ask(answers, try_s): at which seconds a store was asked. It gives these answers, and then none any more."""
    monkeypatch.setattr(retry, "_warnings", retry._Warnings())
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    def ask(answers: Iterable[Exception | None] = (), try_s: float = 0.0) -> list[float]:
        asked, given = [], iter(answers)

        def operation() -> None:
            asked.append(now_s[0] - 1000.0)
            sleep(try_s)
            answer = next(given, TransientStorageError("503 for /root/x"))
            if answer is not None:
                raise answer

        try:
            Patience(sleep=sleep).retry(operation)
        except TransientStorageError:
            return [*asked, -1.0]
        return asked

    return ask


@pytest.mark.parametrize(
    ("try_s", "tries"), [(0.0, range(15, 40)), (30.0, range(4, 7)), (700.0, range(2, 3))]
)
def test_tries_end_in_time(ask: Ask, try_s: float, tries: range) -> None:
    *asked, end = ask(try_s=try_s)
    assert end == -1
    assert len(asked) in tries
    assert asked[-1] - asked[0] < max(90 + 60 + 8, try_s + 1)


def test_what_asking_again_doesn_t_help_is_raised_at_once(ask: Ask) -> None:
    with pytest.raises(StorageError, match="not allowed"):
        ask([StorageError("not allowed")])


def test_a_store_that_gives_no_answer_for_a_while_is_warned_of_early_and_now_and_then(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(ask([TransientStorageError("503")] * 4 + [None])) == 5
    assert caplog.messages == [], "it answers soon"
    ask()
    assert len(caplog.messages) in (2, 3)
    waited_s = float(caplog.messages[0].partition(" for ")[2].partition(" s")[0])
    assert 5 <= waited_s < 20
    assert caplog.messages[0].endswith("and is asked again for up to 90 s: 503 for /root/x")


def test_asking_a_store_draws_no_random_numbers_of_the_training() -> None:
    before = random.getstate()
    assert Patience(total_s=1.0).retry(lambda: 7) == 7
    assert list(Patience(total_s=1.0).pauses_s())
    assert random.getstate() == before
