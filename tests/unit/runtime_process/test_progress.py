"""What the companion is told of the trainer."""

from itertools import pairwise

from stepkeeper.companion.reporter import TrainerState
from stepkeeper.contract import ReportPhase, Restored
from stepkeeper.contract.report import MAX_METRICS
from stepkeeper.progress import Progress


def test_a_finished_step_is_told_at_the_next_tick_and_once() -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    progress.finished(4, {"loss": 0.5})
    assert not told
    progress.flush()
    progress.flush()
    assert [(state.step, state.metrics) for state in told] == [(4, {"loss": "0.5"})]
    assert progress.step == 4


def test_news_are_told_at_once_and_carry_the_last_step() -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    progress.restored(Restored(sequence=7, step=70))
    progress.finished(71, None)
    progress.noticed("sigterm")
    progress.failed("x" * 5000)
    last = told[-1]
    assert (last.phase, last.step, last.notice) == (ReportPhase.TRAINING, 71, "sigterm")
    assert last.error is not None
    assert len(last.error) == 2000
    assert [b.urgent_after(a) for a, b in pairwise(told)] == [True, True]


def test_a_report_is_not_refused_for_too_many_metrics() -> None:
    told: list[TrainerState] = []
    progress = Progress(told.append)
    progress.finished(1, {f"metric-{i}": i for i in range(100)})
    progress.flush()
    assert len(told[0].metrics) == MAX_METRICS
