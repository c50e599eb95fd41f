"""Test what the companion is told of the trainer."""

import json
import logging
from decimal import Decimal
from itertools import pairwise

import pytest
import torch
from typing_extensions import override

from stepkeeper.companion.progress import Progress, StoredMetrics
from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import CommitPoint, Report, ReportPhase
from stepkeeper.contract.report import MAX_METRICS, REPORT_LIMIT_BYTES
from stepkeeper.contract.wire import decode, encode


def test_news_are_told_at_once_and_carry_the_last_step() -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    progress.record_restore(CommitPoint(sequence=7, step=70))
    progress.record_step(71, None)
    progress.record_notice("sigterm")
    progress.set_error("x" * 5000)
    last = told[-1]
    assert (last.phase, last.step, last.notice) == (ReportPhase.TRAINING, 71, "sigterm")
    assert last.error is not None
    assert len(last.error) == 2000
    assert [b.is_urgent_after(a) for a, b in pairwise(told)] == [True, True]


class Unreadable(float):
    """A tensor that can't be read, like one on a device whose buffer is gone."""

    @override
    def __str__(self) -> str:
        raise RuntimeError("the buffer was donated")


class Elsewhere:
    @override
    def __str__(self) -> str:
        raise AssertionError("read in another thread than the training's")


def test_a_metric_that_cannot_be_read_is_told_as_such_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    metrics = {
        "lost": Unreadable(1.0),
        "lazy": Elsewhere(),
        "meta": torch.zeros((), device="meta"),
        "host": torch.tensor(0.5, requires_grad=True),
        "exact": Decimal("0.1"),
        "word": "warm-up",
    }
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            progress.record_step(step, metrics)
            progress.send_latest_step()
    assert [state.step for state in told] == [1, 2]
    assert told[1].metrics == {
        "lost": "?",
        "lazy": "?",
        "meta": "?",
        "host": "0.5",
        "exact": "0.1",
        "word": "warm-up",
    }
    assert len(caplog.records) == 3


def test_a_number_that_is_given_as_text_is_not_stored_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = StoredMetrics()
    for _ in range(2):
        metrics = {"loss": "0.5", "phase": "warm-up", "rate": 0.25, "host": torch.tensor(2.5)}
        assert stored.select(metrics) == {"rate": "0.25", "host": "2.5"}
    (said,) = caplog.messages
    assert said.startswith("the metric 'loss' is the text '0.5'")


@pytest.mark.parametrize("text", ["Once upon a time " * 4000, b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_no_text_of_the_training_keeps_reports_from_being_read(text: str) -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    progress.record_step(7, {f"{text}{i}": text for i in range(MAX_METRICS)})
    progress.set_error(f"no such file: {text}")
    state = decode(TrainerState, json.loads(json.dumps(encode(told[-1]))))
    report = Report(phase=state.phase, step=state.step, metrics=state.metrics, error=state.error).to_json()
    assert len(report) <= REPORT_LIMIT_BYTES
    assert Report.from_json(report).step == 7
