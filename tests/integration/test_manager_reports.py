"""Reports of real trainers to an HTTPS server that stands in for the operator, and the stacks that it asks for."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from fork_server import ForkedProcess, ForkServer
from rank_talk import ended_at_last, hear
from report_endpoint import Operator

from stepkeeper.contract import (
    Directive,
    Endpoint,
    EveryInterval,
    ExitCode,
    Interval,
    Report,
    ReportPhase,
    Settings,
)
from stepkeeper_testing.pod import pod_environ, pod_identity

TRAINERS = Path(__file__).parent / "manager_trainer"
HELD, FREE = "stand_still_with_the_lock", "stand_still_without_the_lock"
Start = Callable[..., ForkedProcess]
"""start(n_steps, interval=10, more_settings=None, **options)"""


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    (tmp_path / "token").write_text("the-token\n")
    server = Operator(tmp_path)
    yield server
    server.close()


def write_settings(
    operator: Operator, folder: Path, steps: int, more: Mapping[str, object] | None = None
) -> None:
    endpoint = Endpoint(url=operator.url, report_interval_s=1)
    settings = Settings(
        uri=(folder / "root").as_uri(), interval=Interval(every=EveryInterval(steps=steps)), endpoint=endpoint
    ).to_json()
    (folder / "settings.json").write_text(json.dumps(json.loads(settings) | dict(more or {})))


@pytest.fixture
def start(torch_server: ForkServer, operator: Operator, tmp_path: Path) -> Iterator[Start]:
    started: list[ForkedProcess] = []

    def start(
        n_steps: int, interval: int = 10, more_settings: Mapping[str, object] | None = None, **options: object
    ) -> ForkedProcess:
        write_settings(operator, tmp_path, interval, more_settings)
        # A proxy that isn't there: whoever asks it gets nowhere.
        proxy = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
        options_text = json.dumps({"pod": str(tmp_path), **options})
        with (tmp_path / "stderr").open("w") as errors:
            started.append(
                torch_server.start(
                    [TRAINERS / "trainer.py", (tmp_path / "root").as_uri(), n_steps, options_text],
                    env=os.environ | pod_environ(pod_identity()) | proxy,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.smoke
def test_the_operator_hears_of_the_whole_life(operator: Operator, start: Start, tmp_path: Path) -> None:
    assert start(40, wait=True, pause_s=0.1).wait(120) == ExitCode.DONE
    phases = [report.phase for report in operator.reports]
    assert phases[0] in (ReportPhase.STARTING, ReportPhase.RESTORING)
    assert phases[-1] is ReportPhase.DONE
    assert operator.tokens == {"Bearer the-token"}
    begun = operator.wait_for(lambda report: report.claim is not None)
    last = operator.reports[-1]
    assert (begun.claim, begun.head, last.root) == (0, None, begun.root)
    assert last.head is not None
    assert (last.step, last.head.step, last.tail >= last.head.sequence) == (40, 40, True)
    assert last.metrics == {"loss": "20.0"}
    told = {commit.sequence: commit for report in operator.reports for commit in report.commits}
    assert [commit.step for commit in told.values()] == [10, 20, 30, 40]
    assert all(commit.uri.startswith((tmp_path / "root").as_uri()) for commit in told.values())


def test_stop_and_checkpoint_now_come_as_answers(operator: Operator, start: Start, tmp_path: Path) -> None:
    def answer(report: Report) -> Directive:
        if report.step is None:
            return Directive()
        if not any(each.commits for each in operator.reports):
            return Directive(
                checkpoint_now="request-1",
                save_reason="its machines are maintained",
                save_within_s=90,
                report_interval_s=1,
            )
        return Directive(stop=True)

    operator.answer = answer
    assert start(100_000, interval=100_000, pause_s=0.01).wait(120) == ExitCode.SAVED
    assert operator.wait_for(lambda report: report.notice is not None).notice == "directive"
    asked = {commit.step for report in operator.reports for commit in report.commits}
    assert 1 <= len(asked) <= 2, "one for the request however often it was repeated, one for the stop"
    told = "the operator requests a save within 90 s: its machines are maintained"
    assert (tmp_path / "stderr").read_text().count(told) == 1


def test_a_next_operator_is_understood_as_far_as_this_version_goes(operator: Operator, start: Start) -> None:
    operator.more = {"save_and_stop_by_s": 30, "pace": {"steps": 2}}
    operator.answer = lambda report: Directive(stop=report.step is not None)
    more = {"liveness": {"step_s": 1800}, "on_disruption": "SaveTwice"}
    assert start(100_000, pause_s=0.01, more_settings=more).wait(120) == ExitCode.SAVED
    assert operator.wait_for(lambda report: report.notice is not None).notice == "directive"


@pytest.mark.smoke
def test_training_goes_on_when_nobody_answers(operator: Operator, start: Start) -> None:
    operator.status = 503
    assert start(30, wait=True).wait(120) == ExitCode.DONE


def test_a_commit_is_told_until_it_was_answered(operator: Operator, start: Start) -> None:
    operator.status = 409
    start(100_000, pause_s=0.01)
    operator.wait_for(lambda report: len(report.commits) >= 2)
    operator.status = 200
    first = operator.wait_for(lambda report: report.step is not None and len(report.commits) >= 2)
    known = {commit.sequence for commit in first.commits}
    later = operator.wait_for(
        lambda report: bool(report.commits) and known.isdisjoint(commit.sequence for commit in report.commits)
    )
    assert later.step is not None


@pytest.fixture
def ranks(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> Iterator[Callable[..., None]]:
    """ranks(**options): two ranks of stacks.py stand still."""
    processes: list[ForkedProcess] = []

    def ranks(**options: object) -> None:
        for rank, server in enumerate(torch_servers):
            with (tmp_path / f"log.{rank}").open("w") as log:
                command = [TRAINERS / "stacks.py", tmp_path, rank, 2, json.dumps(options)]
                processes.append(server.start(command, stdout=subprocess.PIPE, stderr=log))
        for process in processes:
            hear(process, "stands")

    with ended_at_last(processes):
        yield ranks


def wait_for_log(folder: Path, rank: int, wanted: str) -> str:
    ends_s = time.monotonic() + 400
    while wanted not in (log := (folder / f"log.{rank}").read_text()):
        assert time.monotonic() < ends_s, log
        time.sleep(0.05)
    return log


@pytest.mark.parametrize("holds", [0, 1, pytest.param(None, marks=pytest.mark.long)])
def test_a_directive_has_the_stacks_of_all_ranks_logged_and_reported(
    tmp_path: Path, operator: Operator, ranks: Callable[..., None], holds: int | None
) -> None:
    write_settings(operator, tmp_path, 1000)
    operator.answer = lambda _: Directive(report_interval_s=1)
    ranks(holds=holds)
    operator.answer = lambda report: Directive(dump_stacks=report.stacks is None, report_interval_s=1)
    report: Report = operator.wait_for(lambda report: report.stacks is not None)
    operator.answer = lambda _: Directive(report_interval_s=1)
    expected = [HELD if rank == holds else FREE for rank in range(2)]
    for rank, function in enumerate(expected):
        assert "because the operator requested them" in wait_for_log(tmp_path, rank, function)
    first, _, second = (report.stacks or "").partition("rank 1:\n")
    assert (expected[0] in first, expected[1] in second) == (True, True), report.stacks


def test_a_step_that_takes_far_longer_has_the_stacks_of_all_ranks_logged(
    tmp_path: Path, ranks: Callable[..., None]
) -> None:
    ranks(holds=0, after_s=1.0)
    logs = [wait_for_log(tmp_path, rank, function) for rank, function in enumerate((HELD, FREE))]
    assert any("no step has followed step" in log for log in logs)
