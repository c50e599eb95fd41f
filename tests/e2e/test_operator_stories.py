"""Play, on a real cluster and side by side, what users do to their jobs and what their programs do to themselves."""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import pytest

from stepcluster.api import Cluster
from stepcluster.product import NAMESPACE, install_operator
from stepcluster.shelljobs import (
    HOLD,
    ShellJob,
    apply_all,
    causes,
    condition,
    container,
    delete_all,
    until,
    watch_gangs,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PREFIX = "story-"
SAVES = f"trap 'exit 75' TERM; {HOLD}"
"""Stands still until it is released, and obeys SIGTERM as a training does that has saved."""

RAISES = """
echo 'Traceback (most recent call last):' >&2
echo '  File "/app/train.py", line 3, in <module>' >&2
echo 'ValueError: bad batch in shard 7' >&2
exit 1
"""
EXITS_0 = f"trap 'exit 0' TERM; {HOLD}"


def all_jobs(cluster: Cluster) -> Iterator[ShellJob]:
    def job(name: str, script: str, *more: Mapping[str, Any], **fields: Any) -> ShellJob:
        trainer = container("trainer", script, **fields.pop("trainer", {}))
        return ShellJob(cluster=cluster, name=PREFIX + name, containers=[trainer, *more], **fields)

    slow = {"pod": {"terminationGracePeriodSeconds": 20}}
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "late", "key": "token"}}}
    alive_later = 'test "$STEPKEEPER_RESTART_ATTEMPT" != 0'
    dies_once = {
        "exec": {"command": ["sh", "-c", alive_later]},
        "initialDelaySeconds": 3,
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    begins_late = {"initContainers": [container("fetch-data", "sleep 10")]}
    yield job("raises", RAISES, max_failures=1)
    yield job("suspended", SAVES, n_hosts=2, **slow)
    yield job("edited", SAVES, n_hosts=2, **slow)
    yield job("not-alive", SAVES, trainer={"livenessProbe": dies_once}, **slow)
    yield job("again", SAVES, n_hosts=2, **slow)
    yield job("always-75", "exit 75", restarts={"maxFailures": 2, "maxStartsWithoutCheckpoint": 3})
    yield job("late-secret", HOLD, trainer={"env": [token]}, pod=begins_late)
    yield job("exits-0", EXITS_0, max_failures=0, **slow)
    yield job("unwatched", HOLD, n_hosts=2)
    yield job("namespace", HOLD, n_hosts=2)


@pytest.fixture(scope="module")
def jobs(operator: Cluster) -> Iterator[dict[str, ShellJob]]:
    """All jobs, by name without the prefix."""
    operator.load_shell_image()
    # Younger, it has heard of too little to suspend a job for its starts.
    until(lambda: age_of_operator_s(operator) > 65, 100)
    made = list(all_jobs(operator))
    apply_all(operator, made)
    yield {job.name.removeprefix(PREFIX): job for job in made}
    delete_all(operator, made)


def age_of_operator_s(cluster: Cluster) -> float:
    options = ("-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator", "-o", "json")
    pods = json.loads(cluster.kubectl("get", "pods", *options))["items"]
    running = [status["state"]["running"] for pod in pods for status in pod["status"]["containerStatuses"]]
    return min(time.time() - datetime.fromisoformat(each["startedAt"]).timestamp() for each in running)


def edit(job: ShellJob, **spec: Any) -> None:
    job.kubectl("patch", "ctj", job.name, "--type=merge", "-p", json.dumps({"spec": spec}))


def warnings(job: ShellJob, reason: str) -> list[str]:
    options = ("--field-selector", f"type=Warning,reason={reason}")
    return [item["message"] for item in job.get("events", *options)["items"]]


def test_a_crash_loop_ends_failed_with_the_last_line_of_its_traceback(jobs: dict[str, ShellJob]) -> None:
    status = jobs["raises"].until_phase("Failed")
    failed = condition(status, "Failed")
    assert failed["reason"] == "MaxFailuresReached"
    assert "ValueError: bad batch in shard 7" in failed["message"]
    assert causes(status) == ["ApplicationError", "ApplicationError"]
    assert all("ValueError: bad batch in shard 7" in attempt["message"] for attempt in status["attempts"])


def test_what_a_pod_waits_for_is_said_when_nothing_but_the_pod_has_changed(jobs: dict[str, ShellJob]) -> None:
    """No Job or JobSet changes when an init container ends, nor when the trainer then lacks a Secret."""
    job, missing = jobs["late-secret"], 'secret "late" not found'
    status = job.until(
        lambda status: missing in condition(status, "Running").get("message", ""), timeout_s=60
    )
    assert condition(status, "Running")["reason"] == "PodWaiting"
    job.kubectl("create", "secret", "generic", "late", "--from-literal=token=x")
    job.until_phase("Running")
    job.finish()


def test_a_suspended_job_runs_down_and_goes_on_when_it_is_resumed(jobs: dict[str, ShellJob]) -> None:
    job = jobs["suspended"]
    job.until_phase("Running")
    edit(job, suspend=True)
    status = job.until_phase("Suspended")
    assert condition(status, "Suspended")["reason"] == "Requested"
    assert not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"]
    edit(job, suspend=False)
    job.until_phase("Running", attempt=2)
    status = job.finish()
    assert causes(status) == ["Requested", None]
    assert status["restarts"]["byCause"] == [{"cause": "Requested", "count": 1, "countedTowardsLimit": 0}]


def test_a_training_that_saves_when_its_probe_fails_goes_on_and_the_probe_is_named(
    jobs: dict[str, ShellJob],
) -> None:
    job = jobs["not-alive"]
    job.until_phase("Running", attempt=2)
    status = job.finish()
    assert causes(status) == ["Hang", None]
    assert "Container trainer failed liveness probe" in status["attempts"][0]["message"]
    assert status["restarts"]["byCause"] == [{"cause": "Hang", "count": 1, "countedTowardsLimit": 0}]


def test_an_edited_template_gets_new_pods_after_the_old_ones(jobs: dict[str, ShellJob]) -> None:
    job = jobs["edited"]
    job.until_phase("Running")
    with watch_gangs(job) as gangs:
        until(lambda: gangs.seen == [(0, 0)])
        changed = {**container("trainer", SAVES), "env": [{"name": "BATCH", "value": "2"}]}
        edit(job, template={"spec": {"containers": [changed]}})
        job.until_phase("Running", attempt=2)
        status = job.finish()
    assert gangs.seen == [(0, 0), (1, 0)]
    assert gangs.together == []
    assert causes(status) == ["Requested", None]


def test_a_job_that_is_deleted_and_applied_at_once_starts_after_the_old_pods_have_ended(
    jobs: dict[str, ShellJob],
) -> None:
    job = jobs["again"]
    job.until_phase("Running")
    with watch_gangs(job) as gangs:
        until(lambda: len(gangs.seen) == 1)
        began = time.monotonic()
        gangs.jobset_is_deleted()
        job.kubectl("delete", "ctj", job.name, "--wait=false")
        job.kubectl("apply", "-f", "-", stdin=json.dumps(job.manifest()))
        job.until_phase("Running")
        assert time.monotonic() - began < 60
        assert gangs.together == []
    status = job.finish()
    assert condition(status, "Accepted")["status"] == "True"
    assert causes(status) == [None]


def test_a_program_that_always_says_restart_me_is_suspended(jobs: dict[str, ShellJob]) -> None:
    job = jobs["always-75"]
    status = job.until_phase("Suspended")
    suspended = condition(status, "Suspended")
    assert suspended["reason"] == "NoNewCheckpoint"
    # JobSet starts pods by itself, and may have begun one more before it was suspended.
    n_starts = len(causes(status))
    assert n_starts in {3, 4}
    assert f"{n_starts} starts in a row have committed no new checkpoint" in suspended["message"]
    assert causes(status) == ["Requested"] * n_starts
    assert not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"]
    assert len(warnings(job, "Suspended")) == 1
    edit(job, template={"spec": {"containers": [container("trainer", SAVES)]}})
    job.until_phase("Running", attempt=n_starts + 1)
    job.finish()


def test_a_program_that_exits_0_when_it_is_evicted_is_started_again(jobs: dict[str, ShellJob]) -> None:
    job = jobs["exits-0"]
    job.until_phase("Running")
    (pod,) = job.pods()
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{job.name}/pods/{name}/eviction"
    job.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    job.until_phase("Running", attempt=2)
    status = job.finish()
    assert causes(status) == ["Eviction", None]
    assert status["attempts"][0]["message"].startswith("every pod exited 0 after it was asked to stop")


def test_a_namespace_is_gone_within_a_minute_with_all_its_jobs(jobs: dict[str, ShellJob]) -> None:
    job = jobs["namespace"]
    job.until_phase("Running")
    job.cluster.kubectl("delete", "namespace", job.name, "--timeout=60s")
    assert job.cluster.kubectl("get", "namespace", job.name, "--ignore-not-found") == ""


@pytest.fixture
def no_operator(operator: Cluster) -> Iterator[None]:
    """Nobody watches meanwhile."""
    operator.faults.stop_operator()
    yield
    operator.faults.start_operator()


@pytest.mark.usefixtures("no_operator")
def test_a_job_is_gone_within_a_minute_though_no_operator_runs(jobs: dict[str, ShellJob]) -> None:
    job = jobs["unwatched"]
    job.kubectl("delete", "ctj", job.name, "--timeout=60s")
    deadline = time.monotonic() + 60
    kinds = "ctj,jobsets,jobs,pods"
    while job.kubectl("get", kinds, "-o", "name"):
        assert time.monotonic() < deadline, job.kubectl("get", kinds, "-o", "yaml")
        time.sleep(0.5)


def test_an_operator_that_watches_one_namespace_leaves_the_jobs_of_others_alone(operator: Cluster) -> None:
    operator.load_shell_image()
    trainer = [container("trainer", "true")]
    jobs = [
        ShellJob(cluster=operator, name=f"{PREFIX}{name}", containers=trainer)
        for name in ("watched", "elsewhere")
    ]
    watched, elsewhere = jobs
    operator.kubectl("create", "namespace", watched.name)  # the chart makes Roles in it
    try:
        install_operator(operator, more={"watchNamespaces": f"{{{watched.name}}}"}, reportIntervalSeconds=2)
        apply_all(operator, jobs)
        watched.until_phase("Complete")
        assert elsewhere.status() == {}
    finally:
        install_operator(operator, reportIntervalSeconds=2)
    elsewhere.until_phase("Complete")
    delete_all(operator, jobs)
