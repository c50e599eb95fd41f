"""What follows the end of an attempt: the operator's causes, budgets and back-off, with times that the test gives."""

from dataclasses import replace

import pytest

from stepkeeper.contract import (
    Cause,
    CommitPoint,
    Head,
    Report,
    ReportedCommit,
    ReportPhase,
    RestartLimits,
    Termination,
)
from stepkeeper.supervise.judging import AttemptEnd, Finish, Restart, RunHistory, decide
from stepkeeper.supervise.record import RunRecord, describe_commit

LIMITS = RestartLimits(max_failures=2, max_disruptions=2, max_starts=4, initial_wait_s=10, max_wait_s=60)


def ended(code: int, *, after_s: float = 100.0, **known: object) -> AttemptEnd:
    return AttemptEnd(code=code, start_s=0.0, end_s=after_s, **known)  # type: ignore[arg-type]


def history(**known: object) -> RunHistory:
    return RunHistory(limits=LIMITS, **{"n_starts": 1, **known})  # type: ignore[arg-type]


def said(code: int, cause: Cause | None = None, error: str | None = None) -> Termination:
    return Termination(code=code, cause=cause, error=error)


SAVED = Termination(code=75, kind="saved", step=9)
TWO_LINES = Termination(
    code=1,
    rank=0,
    error="Traceback …\nValueError: The state doesn't fit.\nCall prime_optimizer.\n",
    first_failure="rank 0: ValueError: The state doesn't fit.",
)
DONE = Termination(code=0, kind="done", step=9)
NOTIFIED = Termination(code=0, kind="done", step=9, notice="sigterm")


@pytest.mark.parametrize(
    ("end", "cause", "at_s"),
    [
        pytest.param(ended(1), "ApplicationError", 110.0, id="an error waits from its end"),
        pytest.param(ended(139), "ApplicationError", 110.0, id="a crash too"),
        pytest.param(ended(1, message=said(1, Cause.STORAGE_UNAVAILABLE)), "StorageUnavailable", 110.0),
        pytest.param(ended(75), "Requested", None, id="a stop that the program asked for"),
        pytest.param(ended(75, message=said(75, Cause.SPOT_PREEMPTION)), "SpotPreemption", None),
        pytest.param(ended(137, known_cause=Cause.SPOT_PREEMPTION), "SpotPreemption", None),
        pytest.param(
            ended(0, known_cause=Cause.SPOT_PREEMPTION), "SpotPreemption", None, id="preempted, with 0"
        ),
        pytest.param(ended(0, message=NOTIFIED), "Requested", None, id="a stop with 0, after a notice"),
        pytest.param(ended(78), "ApplicationError", 110.0, id="a lost peer before a commit"),
        pytest.param(ended(78, has_committed=True), "NodeFailure", None, id="a lost peer after a commit"),
    ],
)
def test_it_is_restarted_by_the_cause(end: AttemptEnd, cause: str, at_s: float | None) -> None:
    assert decide(history(), end) == Restart(cause=cause, at_s=at_s)


@pytest.mark.parametrize(
    ("past", "end", "code", "why"),
    [
        pytest.param({}, ended(0), 0, "the training is done", id="done"),
        pytest.param(
            {}, ended(0, message=Termination(code=0), is_asked=True), 0, "the training is done", id="done when asked"
        ),
        pytest.param(
            {}, ended(0, message=Termination(code=0), known_cause=Cause.SPOT_PREEMPTION), 0, "the training is done",
            id="done when preempted",
        ),
        pytest.param({}, ended(0, is_asked=True), 75, "stopped with code 0, and no manager was closed", id="left open"),
        pytest.param({}, ended(77), 77, "Stop the other process that uses this root", id="fenced"),
        pytest.param({}, ended(75, message=SAVED, is_asked=True), 75, "saved and stopped. The same", id="asked"),
        pytest.param(
            {}, ended(75, message=replace(SAVED, step=None), is_asked=True), 75, "stopped before it finished a step",
            id="asked early",
        ),
        pytest.param({}, ended(143, is_asked=True), 75, "stopped before it finished a step", id="asked at once"),
        pytest.param({}, ended(137, message=SAVED, is_asked=True), 75, "saved and stopped.", id="killed after that"),
        pytest.param({}, ended(0, message=NOTIFIED, is_asked=True), 75, "saved and stopped.", id="its own handler"),
        pytest.param({}, ended(0, message=DONE, is_asked=True), 0, "the training is done", id="done meanwhile"),
        pytest.param({}, ended(1, is_asked=True), 1, "exited with code 1", id="failed when asked"),
        pytest.param(
            {"n_failures": 2}, ended(1, message=said(1, error="Traceback …\nValueError: bad")), 1,
            "exited with code 1: ValueError: bad. No restart is left after ApplicationError: 2 are allowed",
            id="no failure left",
        ),
        pytest.param(
            {"n_failures": 2}, ended(1, message=TWO_LINES), 1,
            "exited with code 1: ValueError: The state doesn't fit. No restart is left",
            id="the first line of a longer error",
        ),
        pytest.param(
            {"n_failures": 2}, ended(1, message=replace(TWO_LINES, rank=1)), 1,
            "exited with code 1: Call prime_optimizer. No restart is left",
            id="another rank's first line isn't this rank's",
        ),
        pytest.param(
            {"restarts": {"SpotPreemption": 1, "NodeFailure": 1}},
            ended(75, message=said(75, Cause.EVICTION)), 1, "No restart is left after Eviction: 2 are allowed",
            id="no disruption left",
        ),
        pytest.param({"n_starts": 4}, ended(75), 1, "4 starts in a row committed nothing", id="no start left"),
        pytest.param({"n_starts": 4}, ended(0, message=NOTIFIED), 1, "4 starts in a row", id="0 isn't done"),
        pytest.param({"n_failures": 2}, ended(139), 139, "was ended by SIGSEGV", id="a crash's code stays"),
    ],
)  # fmt: skip
def test_it_ends_with_the_code_and_the_reason(
    past: dict[str, object], end: AttemptEnd, code: int, why: str
) -> None:
    found = decide(history(**past), end)
    assert isinstance(found, Finish)
    assert (found.code, why in found.why) == (code, True), found


@pytest.mark.parametrize(
    "end",
    [
        ended(75, message=Termination(code=75, kind="gaveUp", step=9), is_asked=True),
        ended(75, message=Termination(code=75, kind="stopping", step=9), is_asked=True),
        ended(137, is_asked=True),
        ended(75, is_asked=True),
    ],
)
def test_a_stop_that_could_not_save_asks_for_a_restart_and_says_so(end: AttemptEnd) -> None:
    found = decide(history(), end)
    assert isinstance(found, Finish)
    assert (found.code, "the last step isn't saved" in found.why) == (75, True)


def test_a_commit_refills_the_budget_and_ends_the_back_off() -> None:
    used = history().on_restart("ApplicationError").on_start().on_restart("ApplicationError").on_start()
    assert isinstance(decide(used, ended(1)), Finish)
    assert decide(used.on_commit(), ended(1)) == Restart(cause="ApplicationError", at_s=110.0)


def test_failures_wait_longer_each_time_and_starts_that_end_at_once_wait_from_their_start() -> None:
    assert decide(history(n_failures=1), ended(1)) == Restart(cause="ApplicationError", at_s=120.0)
    assert decide(history(n_starts=3), ended(75, after_s=1.0)) == Restart(cause="Requested", at_s=20.0)
    assert decide(history(n_starts=3), ended(75)) == Restart(cause="Requested", at_s=None)


def report(
    phase: ReportPhase = ReportPhase.TRAINING, *, restored: int | None = None, **known: object
) -> Report:
    point = None if restored is None else CommitPoint(sequence=restored, step=restored)
    return Report(phase=phase, restored=point, **known)  # type: ignore[arg-type]


def commit(step: int) -> ReportedCommit:
    return ReportedCommit(
        sequence=step, step=step, uri=f"file:///r/{step}", size_bytes=2048, duration_millis=300, time_unix_s=0
    )


def test_a_run_is_followed_by_its_reports() -> None:
    record = RunRecord(safe_s=0.0).on_start()
    record, commits = record.on_report(report(ReportPhase.RESTORING), 1.0)
    assert (record.is_resumed, commits) == (False, ())
    record, commits = record.on_report(report(step=12, commits=(commit(10),)), 20.0)
    assert [each.step for each in commits] == [10]
    record, commits = record.on_report(report(step=15, commits=(commit(10),)), 25.0)
    assert commits == ()
    # It ends at 17. The next attempt has done 11 to 17 again, and has waited.
    head = Head(sequence=10, step=10, uri="file:///r/10", size_bytes=2048)
    record, _ = record.on_end(17).on_start().on_report(report(restored=10, head=head), 50.0)
    assert (record.restored_step, record.lost_steps, record.lost_s) == (10, 7, 30.0)
    record, _ = record.on_report(report(restored=10, step=40), 60.0)
    assert record.summarize({"NodeFailure": 1}, is_done=True) == (
        "40 steps, 1 checkpoint, 1 restart (1 NodeFailure); lost 7 steps and 30 s",
        "last checkpoint: step 10, file:///r/10",
    )


def test_a_commit_is_described_with_the_pace_of_the_steps() -> None:
    assert describe_commit(commit(10), None) == "step 10 committed, 2.0 KiB in 0.3 s"
    assert describe_commit(commit(10), 250) == "step 10 committed, 2.0 KiB in 0.3 s, 0.25 s/step"


def test_an_attempt_that_never_trained_adds_to_the_time_that_is_lost() -> None:
    record, _ = RunRecord(safe_s=0.0).on_start().on_report(report(step=5, commits=(commit(5),)), 10.0)
    record, _ = record.on_start().on_start().on_report(report(restored=5), 90.0)
    assert (record.lost_steps, record.lost_s) == (0, 80.0)


def test_a_run_that_continues_an_earlier_one_counts_its_own_steps() -> None:
    record, _ = RunRecord(safe_s=0.0).on_start().on_report(report(restored=100, step=103), 5.0)
    assert record.summarize({}, is_done=True)[0] == "3 steps, 0 checkpoints, 0 restarts"


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        pytest.param([], "opened no manager with CheckpointManager.from_env()", id="no manager"),
        pytest.param([report()], "never called manager.step()", id="no step"),
    ],
)
def test_a_run_without_a_checkpoint_says_what_the_script_lacks(reports: list[Report], why: str) -> None:
    record = RunRecord(safe_s=0.0).on_start()
    for each in reports:
        record, _ = record.on_report(each, 5.0)
    assert record.summarize({}, is_done=True)[1] == f"last checkpoint: none, because the script {why}"
    assert record.summarize({}, is_done=False)[1] == "last checkpoint: none"
