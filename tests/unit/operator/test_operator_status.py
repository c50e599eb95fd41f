"""Test the checkpoint and progress parts of the status, from reports and termination messages."""

from typing import Any, Final

import pytest

from fake_cluster.world import training_job
from stepkeeper.contract import (
    CommitPoint,
    Head,
    Report,
    ReportedCommit,
    ReportPhase,
    SlowestRank,
    Termination,
)
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import MAX_RECENT, Bookkeeping, RestartsStatus
from stepkeeper_operator.cache.reports import LastReport, ReportCache
from stepkeeper_operator.decide.status import Mirror, derive_progress, mirror_storage
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory

NO_HISTORY: Final = JobHistory(attempts=(), restarts=RestartsStatus(), bookkeeping=Bookkeeping())


def job(**checkpoint: Any) -> CheckpointedTrainingJob:
    raw = training_job()
    raw["metadata"]["uid"] = "u"
    if checkpoint:
        raw["status"] = {"checkpoint": checkpoint}
    return CheckpointedTrainingJob.model_validate(raw)


def commit(sequence: int) -> ReportedCommit:
    return ReportedCommit(
        sequence=sequence,
        step=sequence * 10,
        uri=f"u/{sequence}",
        size_bytes=5,
        duration_millis=7,
        time_unix_s=9,
    )


def head(sequence: int) -> Head:
    return Head(sequence=sequence, step=sequence * 10, uri=f"u/{sequence}", size_bytes=5)


def observed(report: Report, *, ordinal: tuple[int, int] = (0, 0), received_at: float = 100.0) -> Observed:
    book = ReportCache(silence_s=90)
    book.add_report("u", LastReport(report=report, ordinal=ordinal, received_at=received_at, pod_uid="p"))
    return Observed(report=book.get_report("u"))


def mirror(known: CheckpointedTrainingJob, report: Report, *, running: tuple[int, int] = (0, 0)) -> Mirror:
    return mirror_storage(known, observed(report), running=running)


def training(**more: Any) -> Report:
    base: dict[str, Any] = {"phase": ReportPhase.TRAINING, "root": "r", "tail": 4, "head": head(4)}
    return Report(**(base | more))


def test_the_head_of_a_root_that_is_new_is_taken() -> None:
    result = mirror(job(), training(commits=(commit(4),)))
    assert result.new_commit
    assert result.checkpoint is not None
    assert result.checkpoint.latest is not None
    assert result.checkpoint.latest.to_raw() == {
        "sequence": 4,
        "step": 40,
        "uri": "u/4",
        "time": "1970-01-01T00:00:09Z",
        "sizeBytes": 5,
        "durationMillis": 7,
    }
    assert (result.checkpoint.root, result.checkpoint.tail) == ("r", 4)


KNOWN: dict[str, Any] = {"root": "r", "tail": 9, "latest": {"sequence": 9, "step": 90, "uri": "u/9"}}


def test_a_head_of_a_tail_that_is_known_already_is_not_taken() -> None:
    result = mirror(job(**KNOWN), training(tail=9, head=head(8)))
    assert not result.new_commit
    assert result.checkpoint == job(**KNOWN).status.checkpoint


def test_a_rollback_moves_the_head_back_and_is_no_new_commit() -> None:
    result = mirror(job(**KNOWN), training(tail=10, head=head(8)))
    assert not result.new_commit
    assert result.checkpoint is not None
    assert result.checkpoint.latest is not None
    assert result.checkpoint.latest.sequence == 8


def test_another_root_starts_anew_however_short_its_log_is() -> None:
    result = mirror(job(**KNOWN), training(root="s", tail=2, head=head(2)))
    assert result.checkpoint is not None
    assert (result.checkpoint.root, result.checkpoint.tail) == ("s", 2)
    assert result.checkpoint.latest is not None
    assert result.checkpoint.latest.sequence == 2


@pytest.mark.parametrize("report", [training(root="s", tail=1, head=None), training(tail=11, head=None)])
def test_without_a_head_there_is_no_latest_commit(report: Report) -> None:
    """The root is new, or all its commits are quarantined."""
    result = mirror(job(**KNOWN), report)
    assert result.checkpoint is not None
    assert result.checkpoint.latest is None
    assert not result.new_commit


def test_what_another_root_held_before_is_no_new_commit_and_what_a_pod_makes_in_it_is() -> None:
    old = training(root="s", tail=2, head=head(2))
    assert not mirror(job(**KNOWN), old).new_commit
    assert not mirror(job(), old).new_commit
    made = training(root="s", tail=4, head=head(4), commits=(commit(4),))
    assert mirror(job(**KNOWN), made).new_commit


def test_a_later_head_of_the_jobs_own_root_is_a_new_commit_though_no_report_named_it() -> None:
    assert mirror(job(**KNOWN), training(tail=11, head=head(11))).new_commit


def test_a_report_before_begin_changes_nothing() -> None:
    result = mirror(job(**KNOWN), Report(phase=ReportPhase.STARTING))
    assert result.checkpoint == job(**KNOWN).status.checkpoint


def test_the_newest_commits_are_kept_in_their_order_without_doubles() -> None:
    book = ReportCache(silence_s=90)
    for sequence in (3, 4, 4, 5, *range(6, 20)):
        report = training(tail=sequence, head=head(sequence), commits=(commit(sequence),))
        book.add_report("u", LastReport(report=report, ordinal=(0, 0), received_at=1.0, pod_uid="p"))
    result = mirror_storage(job(), Observed(report=book.get_report("u")), running=(0, 0))
    assert result.checkpoint is not None
    assert [entry.sequence for entry in result.checkpoint.recent] == list(range(10, 20))
    assert len(result.checkpoint.recent) == MAX_RECENT


def test_what_an_attempt_restored_is_shown_while_it_is_the_present_one() -> None:
    report = training(restored=CommitPoint(sequence=3, step=30), in_flight_step=50)
    present, past = mirror(job(), report), mirror(job(), report, running=(0, 1))
    assert present.checkpoint is not None
    assert present.checkpoint.restored is not None
    assert (present.checkpoint.restored.sequence, present.checkpoint.in_flight_step) == (3, 50)
    assert past.checkpoint is not None
    assert (past.checkpoint.restored, past.checkpoint.in_flight_step) == (None, None)


def test_an_attempt_that_trains_from_scratch_shows_no_restored_commit() -> None:
    known = job(**KNOWN, restored={"sequence": 3, "step": 30})
    result = mirror(known, training())
    assert result.checkpoint is not None
    assert result.checkpoint.restored is None


def test_progress_is_a_percentage_an_estimate_and_the_time_it_was_last_seen_to_move() -> None:
    report = training(
        step=250,
        step_millis=2000,
        ranks=SlowestRank(slowest=3, step=249),
        metrics={"loss": "1.25", "lr": "x" * 100},
    )
    progress = derive_progress(job(), observed(report), NO_HISTORY)
    assert progress is not None
    assert (progress.percent, progress.eta_seconds, progress.slowest_rank) == (25, 1500, 3)
    assert progress.last_progress_time == 100
    assert [(metric.name, len(metric.value)) for metric in progress.metrics] == [("loss", 4), ("lr", 64)]


def test_a_step_that_stands_still_keeps_the_time_it_moved_at() -> None:
    raw = training_job()
    raw["metadata"]["uid"] = "u"
    raw["status"] = {"progress": {"step": 250, "lastProgressTime": "1970-01-01T00:00:50Z"}}
    known = CheckpointedTrainingJob.model_validate(raw)
    progress = derive_progress(known, observed(training(step=250)), NO_HISTORY)
    assert progress is not None
    assert progress.last_progress_time == 50


def test_last_words_are_short_enough_to_be_read_back() -> None:
    word = Termination(code=1, error="é" * 9000)
    assert Termination.from_json(word.to_json()).code == 1


def test_an_estimate_beyond_all_bounds_is_one_that_the_api_keeps() -> None:
    progress = derive_progress(job(), observed(training(step=0, step_millis=2**53)), NO_HISTORY)
    assert progress is not None
    assert progress.eta_seconds == 2**53
