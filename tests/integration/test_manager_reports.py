"""Reports of a real trainer to an HTTPS server that stands in for the operator."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fork_server import ForkedProcess, ForkServer
from report_endpoint import Operator, make_certificate

from stepkeeper.contract import (
    Directive,
    Endpoint,
    ExitCode,
    Interval,
    Report,
    ReportPhase,
    Settings,
)
from stepkeeper_testing.pod import pod_environ, pod_identity

TRAINER = Path(__file__).parent / "manager_trainer" / "trainer.py"
STARTED: list[ForkedProcess] = []


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    folder = tmp_path / "pod"
    folder.mkdir()
    make_certificate(folder)
    (folder / "token").write_text("the-token\n")
    return folder


@pytest.fixture
def operator(pod: Path) -> Iterator[Operator]:
    server = Operator(pod)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_trainer_is_left() -> Iterator[None]:
    """Also where a test goes red: a process that nobody has waited for fails the test in which it is collected."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def start_trainer(
    server: ForkServer,
    pod: Path,
    url: str,
    n_steps: int,
    *,
    interval: int = 10,
    more: Mapping[str, object] | None = None,
    **options: object,
) -> ForkedProcess:
    uri = (pod.parent / "root").as_uri()
    settings = Settings(
        uri=uri,
        interval=Interval(steps=interval),
        endpoint=Endpoint(url=url, report_interval_s=1),
    )
    (pod / "settings.json").write_text(json.dumps(json.loads(settings.to_json()) | dict(more or {})))
    identity = pod_identity()
    # A proxy that isn't there: whoever asks it gets nowhere.
    env = (
        os.environ
        | pod_environ(identity)
        | {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    )
    command = [TRAINER, uri, n_steps, json.dumps({"pod": str(pod), **options})]
    with (pod / "stderr").open("w") as errors:
        process = server.start(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
    STARTED.append(process)
    return process


@pytest.mark.smoke
def test_the_operator_hears_of_the_whole_life(
    operator: Operator, torch_server: ForkServer, pod: Path
) -> None:
    process = start_trainer(torch_server, pod, operator.url, 40, wait=True, pause_s=0.1)
    assert process.wait(120) == ExitCode.DONE
    phases = [report.phase for report in operator.reports]
    assert phases[0] in (ReportPhase.STARTING, ReportPhase.RESTORING)
    assert phases[-1] is ReportPhase.DONE
    assert operator.tokens == {"Bearer the-token"}
    begun = operator.wait_for(lambda report: report.claim is not None)
    assert (begun.claim, begun.head) == (0, None)
    last = operator.reports[-1]
    assert last.root == begun.root
    assert last.head is not None
    assert (last.step, last.head.step, last.tail >= last.head.sequence) == (40, 40, True)
    assert last.metrics == {"loss": "20.0"}
    told = {commit.sequence: commit for report in operator.reports for commit in report.commits}
    assert [commit.step for commit in told.values()] == [10, 20, 30, 40]
    assert all(commit.uri.startswith((pod.parent / "root").as_uri()) for commit in told.values())


def test_stop_and_checkpoint_now_come_as_answers(
    operator: Operator, torch_server: ForkServer, pod: Path
) -> None:
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
    process = start_trainer(torch_server, pod, operator.url, 100_000, interval=100_000, pause_s=0.01)
    assert process.wait(120) == ExitCode.SAVED
    stopped = operator.wait_for(lambda report: report.notice is not None)
    assert stopped.notice == "directive"
    asked = {commit.step for report in operator.reports for commit in report.commits}
    assert 1 <= len(asked) <= 2, "one for the request however often it was repeated, one for the stop"
    told = "the operator asks for a save within 90 s: its machines are maintained"
    assert (pod / "stderr").read_text().count(told) == 1


def test_a_next_operator_is_understood_as_far_as_this_version_goes(
    operator: Operator, torch_server: ForkServer, pod: Path
) -> None:
    operator.more = {"save_and_stop_by_s": 30, "pace": {"steps": 2}}
    operator.answer = lambda report: Directive(stop=report.step is not None)
    more = {"liveness": {"step_s": 1800}, "on_disruption": "SaveTwice"}
    process = start_trainer(torch_server, pod, operator.url, 100_000, pause_s=0.01, more=more)
    assert process.wait(120) == ExitCode.SAVED
    assert operator.wait_for(lambda report: report.notice is not None).notice == "directive"


@pytest.mark.smoke
def test_training_goes_on_when_nobody_answers(
    operator: Operator, torch_server: ForkServer, pod: Path
) -> None:
    operator.status = 503
    process = start_trainer(torch_server, pod, operator.url, 30, wait=True)
    assert process.wait(120) == ExitCode.DONE


def test_a_commit_is_told_until_it_was_answered(
    operator: Operator, torch_server: ForkServer, pod: Path
) -> None:
    operator.status = 409
    start_trainer(torch_server, pod, operator.url, 100_000, pause_s=0.01)
    operator.wait_for(lambda report: len(report.commits) >= 2)
    operator.status = 200
    first = operator.wait_for(lambda report: report.step is not None and len(report.commits) >= 2)
    known = {commit.sequence for commit in first.commits}
    later = operator.wait_for(
        lambda report: bool(report.commits) and known.isdisjoint(commit.sequence for commit in report.commits)
    )
    assert later.step is not None
