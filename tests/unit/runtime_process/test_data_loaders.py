"""What is borne of a DataLoader whose workers end with the notice, with real workers and real signals."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stepkeeper.training.notices.data_loaders import (
    bearing_ends_of_children,
    interrupts_a_step,
)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_rank_that_waits_for_a_batch_is_between_its_updates() -> None:
    def end(*_: object) -> None:
        raise RuntimeError("a worker has ended")

    signal.signal(signal.SIGUSR1, end)
    with pytest.raises(RuntimeError) as within:
        signal.raise_signal(signal.SIGUSR1)
    assert interrupts_a_step(within.value)

    class Data:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            signal.raise_signal(signal.SIGUSR1)
            return index

    data: Any = Data()
    with pytest.raises(RuntimeError) as between:
        next(iter(DataLoader(data)))
    assert not interrupts_a_step(between.value)


def test_what_a_handler_for_children_raises_ends_nothing_within(caplog: pytest.LogCaptureFixture) -> None:
    # Children of other tests may end at any time: only this test's signal is answered.
    told: list[bool] = [False]

    def end(number: int, frame: object) -> None:
        if told[-1]:
            raise RuntimeError("a worker has ended")

    signal.signal(signal.SIGCHLD, end)
    with bearing_ends_of_children():
        told.append(True)
        signal.raise_signal(signal.SIGCHLD)
        told.append(False)
    assert "a worker has ended" in caplog.text
    assert signal.getsignal(signal.SIGCHLD) is end
