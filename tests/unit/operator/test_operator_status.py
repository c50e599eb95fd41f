"""Test the checkpoint and progress parts of the status, from reports and termination messages."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import make_history, make_view
from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import end_pods, play, run_job, table
from fake_cluster.world import World, training_job
from stepkeeper.contract import CommitPoint, Head, Report, ReportedCommit, ReportPhase, SlowestRank
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    CheckpointStatus,
    OperatorState,
    ProgressStatus,
    RestartsStatus,
)
from stepkeeper_operator.cache.reports import LastReport, ReportCache, TrainerStatus
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.decide.status import Mirror, derive_progress, mirror_storage
from stepkeeper_operator.training_jobs.observed import Observed

NO_HISTORY: Final = JobHistory(attempts=(), restarts=RestartsStatus(), operator=OperatorState())


def job(**checkpoint: Any) -> CheckpointedTrainingJob:
    return job_with(checkpoint=checkpoint) if checkpoint else job_with()


def job_with(**status: Any) -> CheckpointedTrainingJob:
    raw = training_job()
    raw["metadata"]["uid"] = "u"
    return CheckpointedTrainingJob.model_validate(raw | {"status": status})


def head(sequence: int) -> Head:
    return Head(sequence=sequence, step=sequence * 10, uri=f"u/{sequence}", size_bytes=5)


def commit(sequence: int) -> ReportedCommit:
    at = head(sequence)
    return ReportedCommit(
        sequence=sequence, step=at.step, uri=at.uri, size_bytes=5, duration_millis=7, time_unix_s=9
    )


def observed(*reports: Report) -> Observed:
    book = ReportCache(report_interval_s=10)
    for report in reports:
        last = LastReport(report=report, ordinal=(0, 0), received_at=100.0, pod_uid="p")
        book.add_report("u", last)
    return Observed(report=book.get_report("u"))


def mirror(known: CheckpointedTrainingJob, *reports: Report) -> Mirror:
    return mirror_storage(known, observed(*reports), running=(0, 0))


def training(*, commits: tuple[int, ...] = (), **more: Any) -> Report:
    base: dict[str, Any] = {"phase": ReportPhase.TRAINING, "root": "r", "tail": 4, "head": head(4)}
    return Report(commits=tuple(map(commit, commits)), **(base | more))


KNOWN: dict[str, Any] = {"root": "r", "tail": 9, "latest": {"sequence": 9, "step": 90, "uri": "u/9"}}


@table(
    "known, report, latest, is_new",
    {
        "the first root": ({}, training(commits=(4,)), 4, True),
        "the first root held it before": ({}, training(), 4, False),
        "a tail that is known already": (KNOWN, training(tail=9, head=head(8)), 9, False),
        "a commit that no report named": (KNOWN, training(tail=11, head=head(11)), 11, True),
        "a rollback": (KNOWN, training(tail=10, head=head(8)), 8, False),
        "all commits are quarantined": (KNOWN, training(tail=11, head=None), None, False),
        "another root held it": (KNOWN, training(root="s", tail=2, head=head(2)), 2, False),
        "a pod makes it in another root": (KNOWN, training(root="s", commits=(4,)), 4, True),
        "a new root": (KNOWN, training(root="s", tail=1, head=None), None, False),
        "a report before begin": (KNOWN, Report(phase=ReportPhase.STARTING), 9, False),
    },
)
def test_the_head_that_is_shown_and_whether_it_is_a_new_commit(
    known: dict[str, Any], report: Report, latest: int | None, *, is_new: bool
) -> None:
    result = mirror(job(**known), report)
    assert result.new_commit is is_new
    assert result.checkpoint is not None
    shown = result.checkpoint.latest
    assert (None if shown is None else shown.sequence) == latest
    if shown is not None and latest != known.get("latest", {}).get("sequence"):
        assert (result.checkpoint.root, result.checkpoint.tail) == (report.root, report.tail)


def test_what_a_pod_says_of_its_commits_is_shown_in_their_order_without_doubles() -> None:
    sequences = (3, 4, 4, 5, *range(6, 20))
    result = mirror(job(), *(training(tail=n, head=head(n), commits=(n,)) for n in sequences))
    assert result.checkpoint is not None
    assert result.checkpoint.recent == (), "all saves took as long as the latest"
    assert result.checkpoint.latest is not None
    assert result.checkpoint.latest.to_raw() == {
        "sequence": 19,
        "step": 190,
        "uri": "u/19",
        "time": "1970-01-01T00:00:09Z",
        "sizeBytes": 5,
        "durationMillis": 7,
    }


def test_of_ten_commits_the_longest_save_is_kept_also_by_a_new_operator() -> None:
    def last(known: CheckpointedTrainingJob, *sequences: int) -> CheckpointStatus:
        slow = replace(commit(4), duration_millis=900)
        reports = [
            training(tail=n, head=head(n)) if n != 4 else replace(training(tail=4), commits=(slow,))
            for n in sequences
        ]
        reports = [r if r.commits else replace(r, commits=(commit(r.tail),)) for r in reports]
        result = mirror(known, *reports).checkpoint
        assert result is not None
        return result

    before = last(job(), *range(3, 9))
    assert [each.sequence for each in before.recent] == [4]
    kept = last(job(**before.to_raw()), *range(9, 13))
    assert [each.sequence for each in kept.recent] == [4], "the new operator has heard of four more"
    assert last(job(**before.to_raw()), *range(9, 20)).recent == (), "ten newer ones are known"


def test_progress_is_a_percentage_an_estimate_and_the_time_it_was_last_seen_to_move() -> None:
    report = training(
        step=250,
        step_millis=2000,
        ranks=SlowestRank(slowest=3, step=249),
        metrics={"loss": "1.25", "lr": "x" * 100},
    )
    progress = derive_progress(make_view(job(), observed(report)), NO_HISTORY)
    assert progress is not None
    assert (progress.percent, progress.eta_seconds, progress.slowest_rank) == (25, 1500, 3)
    assert progress.last_progress_time == 100
    assert [(metric.name, len(metric.value)) for metric in progress.metrics] == [("loss", 4), ("lr", 64)]
    for step, shown in ((250, "the step stands still"), (251, "the step went backwards")):
        known = job_with(progress={"step": step, "lastProgressTime": "1970-01-01T00:00:50Z"})
        progress = derive_progress(
            make_view(known, observed(report)), make_history(Attempt(number=1, start=0))
        )
        assert progress is not None
        assert (progress.step, progress.last_progress_time) == (250, 50), shown


async def test_the_last_step_is_shown_though_the_operator_saw_the_end_late() -> None:
    world = await play(await run_job(), "report 3 350, look, wait 60, look, away")
    end_pods(world, 0, step=1000, root="r", committed=CommitPoint(sequence=9, step=1000))
    await play(
        world, "act, act, act, wait 7200, restart, run, phase Complete, latest 9 1000, step 1000, rests"
    )
    progress = world.status.progress
    assert progress is not None
    assert (progress.step, progress.percent, progress.eta_seconds) == (1000, 100, None)
    assert progress.last_progress_time == world.status.attempts[-1].end


async def test_the_next_attempt_shows_its_own_steps_though_the_last_one_came_further() -> None:
    world = await play(await run_job(), "report 3 30, look, wait 60, look")
    end_pods(world, 1, step=99)
    await play(world, "run 12")
    assert world.status.progress is not None
    assert world.status.progress.step == 99
    await play(world, "report 3 31, look, wait 60, look, step 31")
    assert world.status.progress.step == 31


def test_an_estimate_beyond_all_bounds_is_one_that_the_api_keeps() -> None:
    report = training(step=0, step_millis=2**53)
    progress = derive_progress(make_view(job(), observed(report)), NO_HISTORY)
    assert progress is not None
    assert progress.eta_seconds == 2**53


def fail(world: World, committed: str = "", root: str = "r") -> None:
    """End all trainers with code 1; their termination messages name a commit of theirs."""
    point = CommitPoint(sequence=int(committed), step=10 * int(committed)) if committed else None
    for pod in world.pods:
        message = termination_message(1, root=root, committed=point, error="ValueError: x", step=999)
        world.controllers.end_pod(pod, 1, message=message)


async def test_a_job_whose_reports_never_arrive_lives_as_long_as_its_last_words_name_new_commits() -> None:
    world = await run_job()
    for sequence in range(10, 70, 10):
        story = f"phase Running, fail {sequence}, run 30, latest {sequence} {10 * sequence}"
        await play(world, story, fail=fail)
    await play(world, "costs ApplicationError=6/1, starts 1")
    for _ in range(4):
        await play(world, "fail, run 30", fail=fail)
    await play(world, "condition Failed True/MaxFailuresReached")


async def test_a_commit_that_turned_out_to_be_bad_is_not_shown_again() -> None:
    # The termination messages name commit 7, step 120.
    world = await play(await run_job(spot=True), "report 5 100, look, preempt, run, latest 7 120")
    older = Head(sequence=5, step=100, uri="gs://b/5", size_bytes=1)
    world.receive_report(training(tail=9, head=older, step=101, restored=CommitPoint(sequence=5, step=100)))
    await play(world, "run 3, latest 5 100, starts 1, rests, restart, run 3, latest 5 100")
    await play(world, "report 11 130, look, latest 11 130, starts 0")


async def test_last_words_of_another_root_count_only_while_nothing_newer_is_known() -> None:
    world = await run_job()
    await play(world, "report 7 120, look, wait 5, fail 8, run, latest 8 80", fail=fail)
    # The uri was edited before this start, and no report of it arrived.
    await play(world, "fail 3 other, run, latest 3 30, rests, fail, run 30", fail=fail)
    await play(world, "costs ApplicationError=3/2")
    world.receive_report(training(root="third", tail=3, head=head(2), step=12))
    await play(world, "run 2, latest 2 20, costs ApplicationError=3/2")  # an old root refills no budget
    world.receive_report(training_report(sequence=9, step=140, root="third"))
    await play(world, "run 3, latest 9 140, costs ApplicationError=3/0, rests")


TRAINERS: Final[dict[str, Any]] = {"percent": 70, "remaining_s": 9, "metrics": {"loss": "0.5"}}


@table(
    "total, report, ordinal, shown",
    {
        "no report": (1000, None, (0, 0), (70, 9, ["0.5"])),
        "a report without a step": (1000, training(), (0, 0), (70, 9, ["0.5"])),
        "the companion's step": (1000, training(step=250, step_millis=2000), (0, 0), (25, 1500, ["0.5"])),
        "the companion's metrics": (1000, training(metrics={"loss": "1"}), (0, 0), (70, 9, ["1"])),
        "no number of steps": (None, training(step=250, step_millis=2000), (0, 0), (70, 9, ["0.5"])),
        "an earlier attempt": (1000, training(step=250), (0, 1), (25, None, [])),
    },
)
def test_what_the_trainer_reports_by_itself_is_shown_where_the_companion_has_nothing(
    total: int | None,
    report: Report | None,
    ordinal: tuple[int, int],
    shown: tuple[int | None, int | None, list[str]],
) -> None:
    given = job_with().model_copy(update={"spec": job_with().spec.model_copy(update={"total_steps": total})})
    status = TrainerStatus(ordinal=(0, 0), **TRAINERS)
    seen = replace(observed() if report is None else observed(report), trainer_status=status)
    job_sets, restarts = ordinal
    history = make_history(job_sets=job_sets + 1, restarts_seen=restarts)
    progress = derive_progress(make_view(given, seen), history)
    assert progress is not None
    assert (progress.percent, progress.eta_seconds, [m.value for m in progress.metrics]) == shown
    has_step = report is not None and report.step is not None
    assert progress.display == (("250/1000" if total else "250") if has_step else "70%")
    assert progress.longest_step_millis is None


@table(
    "status, ordinal, shown",
    {
        "the attempt has ended": (
            TrainerStatus(ordinal=(0, 0), percent=71, remaining_s=9),
            (0, 1),
            (70, None),
        ),
        "it begins": (TrainerStatus(ordinal=(0, 1), percent=0), (0, 1), (70, None)),
        "its first step": (TrainerStatus(ordinal=(0, 1), percent=0, remaining_s=9), (0, 1), (0, None)),
        "its later steps": (TrainerStatus(ordinal=(0, 1), percent=72, remaining_s=9), (0, 1), (72, None)),
    },
)
@pytest.mark.parametrize("report", [None, training(step=250)])
def test_a_restart_takes_no_share_away_and_the_trainers_time_is_that_of_the_first_start_only(
    status: TrainerStatus, ordinal: tuple[int, int], shown: tuple[int, int | None], report: Report | None
) -> None:
    """transformers posts 0 % before it resumes, and then divides the time since the start by all steps."""
    given = job_with(progress=ProgressStatus(percent=70))
    given = given.model_copy(update={"spec": given.spec.model_copy(update={"total_steps": None})})
    seen = replace(observed() if report is None else observed(report), trainer_status=status)
    history = make_history(job_sets=ordinal[0] + 1, restarts_seen=ordinal[1])
    progress = derive_progress(make_view(given, seen), history)
    assert progress is not None
    assert (progress.percent, progress.eta_seconds) == shown
    assert progress.display == ("250" if progress.step else f"{shown[0]}%")
