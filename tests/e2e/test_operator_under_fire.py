"""Do to the operator, on a real cluster, what once made it charge the wrong cause, start two gangs or stand still."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from stepcluster.api import Cluster
from stepcluster.product import NAMESPACE
from stepcluster.shelljobs import (
    HOLD,
    Gangs,
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

PREFIX = "fire-"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:stepkeeper-operator"
FAILED, RUNS = "ApplicationError", None

OUT_OF_MEMORY = "dd if=/dev/zero of=/dev/null bs=64M count=1; exit $?"
"""The kernel kills a child: the shell lives, and says so with exit code 137."""

BAD_WORDS = {
    0: '{"code":75,"step":-1}',
    1: '{"code":75,"step":99999999999999999999,"claim":1}',
    2: '{"code":75,"cause":"' + "Flood" * 50 + '"}',
    3: '{"code":75,"root":"' + "r" * 65 + '"}',
    4: "[" * 4000,
}
"""Termination messages, by restart: nothing of them may stand in the status as it is."""

ON_TPU_0 = {
    "nodeSelector": {"kubernetes.io/hostname": "tpu-0"},
    "tolerations": [
        {"key": key, "operator": "Exists"} for key in ("google.com/tpu", "cloud.google.com/gke-spot")
    ],
}
MADE_UP = {(255, "Unknown"), (137, "ContainerStatusUnknown")}
"""What a node says after its restart of a container that it finds dead, and of one that it doesn't find."""

NO_PODS_ALLOWED = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "none", "namespace": f"{PREFIX}quota"},
    "spec": {"hard": {"pods": "0"}},
}


def say_bad_words() -> str:
    cases = [
        f"{restart}) printf %s '{words}' > /dev/termination-log; exit 75;;"
        for restart, words in BAD_WORDS.items()
    ]
    return "\n".join(["case $STEPKEEPER_RESTART_ATTEMPT in", *cases, "esac", "exit 0"])


def all_jobs(cluster: Cluster) -> Iterator[ShellJob]:
    """All of them run side by side; those that stand still wait for their test."""

    def job(name: str, script: str, *more: Mapping[str, Any], **fields: Any) -> ShellJob:
        trainer = container("trainer", script, **fields.pop("trainer", {}))
        return ShellJob(cluster=cluster, name=PREFIX + name, containers=[trainer, *more], **fields)

    dies = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    memory = {"resources": {"limits": {"memory": "32Mi"}}}
    yield job("exit-137", "exit 137")
    yield job("out-of-memory", OUT_OF_MEMORY, trainer=memory, max_failures=1)
    yield job("not-alive", HOLD, trainer={"livenessProbe": dies}, max_failures=1)
    yield job("too-late", HOLD, pod={"activeDeadlineSeconds": 5}, max_failures=1)
    yield job("init", "exit 0", pod={"initContainers": [container("fetch-data", "exit 3")]}, max_failures=1)
    yield job("sidecar", "exit 0", container("uploader", "exit 4"), max_failures=1)
    yield job("bad-words", say_bad_words())
    yield job("by-hand", HOLD, n_hosts=2, pod={"terminationGracePeriodSeconds": 5})
    yield job("quota", HOLD)
    yield job("rebooted", HOLD, pod=ON_TPU_0, max_failures=0)


@pytest.fixture(scope="module")
def jobs(operator: Cluster) -> Iterator[dict[str, ShellJob]]:
    """All jobs, by name without the prefix."""
    operator.load_shell_image()
    made = list(all_jobs(operator))
    apply_all(operator, made, NO_PODS_ALLOWED)
    yield {job.name.removeprefix(PREFIX): job for job in made}
    delete_all(operator, made)


def runs_not_for(reason: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: condition(status, "Running").get("reason") == reason


def restarts(status: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By cause: how many, and how many of them count towards a limit."""
    by_cause = status["restarts"]["byCause"]
    assert status["restarts"]["total"] == sum(entry["count"] for entry in by_cause)
    return {entry["cause"]: (entry["count"], entry["countedTowardsLimit"]) for entry in by_cause}


@pytest.mark.parametrize(
    ("name", "n_restarts", "said"),
    [
        ("exit-137", 3, "exited with code 137 (SIGKILL)"),
        ("out-of-memory", 1, "exited with code 137 (OOMKilled: it used more memory than its limit)"),
        ("not-alive", 1, "exited with code 137 (Container trainer failed liveness probe)"),
        ("too-late", 1, "was ended at its activeDeadlineSeconds: Pod was active on the node longer than"),
        ("init", 1, "container 'fetch-data' of pod"),
        ("sidecar", 1, "container 'uploader' of pod"),
    ],
)
def test_who_fails_by_itself_pays_for_it_and_comes_to_an_end(
    jobs: dict[str, ShellJob], name: str, n_restarts: int, said: str
) -> None:
    """JobSet deletes a pod that has failed, and so it looks like one that was killed: it is charged all the same."""
    job = jobs[name]
    status = job.until_phase("Failed")
    assert causes(status) == [FAILED] * (n_restarts + 1)
    assert restarts(status) == {FAILED: (n_restarts, n_restarts)}
    assert all(said in attempt["message"] for attempt in status["attempts"])
    failed = condition(status, "Failed")
    assert failed["reason"] == "MaxFailuresReached"
    assert said in failed["message"]
    assert condition(status, "Running")["status"] == "False"
    jobset = job.get("jobset", job.name)
    assert jobset["status"]["terminalState"] == "Failed"
    assert {pod["status"]["phase"] for pod in job.pods()} == {"Failed"}


def test_bad_values_in_a_last_word_spoil_no_status(operator: Cluster, jobs: dict[str, ShellJob]) -> None:
    job = jobs["bad-words"]
    status = job.until_phase("Complete")
    expected: list[str | None] = ["Requested" for _ in BAD_WORDS]
    expected[2] = "Disruption"
    assert causes(status) == [*expected, RUNS]
    assert restarts(status) == {"Requested": (4, 0), "Disruption": (1, 0)}
    assert all("toStep" not in attempt for attempt in status["attempts"])
    assert refused_writes(operator) == []


def refused_writes(cluster: Cluster) -> list[str]:
    """Return the operator's writes that the API server found to be no valid object."""
    return [
        f"{entry['verb']} {entry['requestURI']}"
        for entry in cluster.audit_entries(ACCOUNT)
        if entry.get("responseStatus", {}).get("code") == 422
    ]


def test_a_jobset_deleted_by_hand_is_made_again_when_its_pods_are_gone(jobs: dict[str, ShellJob]) -> None:
    job = jobs["by-hand"]
    with watch_gangs(job) as gangs:
        first = began(job, gangs)
        gangs.jobset_is_deleted()
        job.kubectl("delete", "jobset", job.name, "--wait=false")
        status = job.until(runs_not_for("NoJobSet"))
        assert "an earlier JobSet left " in condition(status, "Running")["message"]
        status = job.until_phase("Running", attempt=2)
    made_again_once(job, gangs, status, first)


def began(job: ShellJob, gangs: Gangs) -> str:
    """The first gang runs, and is watched; the uid of its JobSet."""
    job.until_phase("Running", attempt=1)
    until(lambda: gangs.seen == [(0, 0)])
    return job.jobset_uid()


def made_again_once(job: ShellJob, gangs: Gangs, status: dict[str, Any], first: str) -> None:
    assert job.jobset_uid() not in {"", first}
    assert gangs.seen == [(0, 0), (1, 0)]
    assert gangs.together == []
    assert causes(status) == ["Requested", RUNS]
    assert status["attempts"][0]["message"] == "its JobSet was deleted"
    assert restarts(status) == {"Requested": (1, 0)}
    job.release()


def test_pods_that_cannot_be_made_are_missed_and_where_to_look_is_said(jobs: dict[str, ShellJob]) -> None:
    job = jobs["quota"]
    status = job.until(runs_not_for("NoPods"))
    assert status["phase"] == "Starting"
    said = condition(status, "Running")["message"]
    assert said.startswith("0 of 1 pods are running, and none was created in the last 30 s")
    commands = [shlex.split(text.rstrip(".")) for text in said.partition("JobSet and Jobs: ")[2].split("; ")]
    assert [command[0] for command in commands] == ["kubectl", "kubectl"]
    assert any("exceeded quota: none" in job.cluster.kubectl(*command[1:]) for command in commands)
    events = job.kubectl("get", "events", "--field-selector", "type=Warning,reason=NoPods", "-o", "name")
    assert len(events.split()) == 1


def test_a_node_that_reboots_costs_no_failure(operator: Cluster, jobs: dict[str, ShellJob]) -> None:
    job = jobs["rebooted"]
    with watch_gangs(job) as gangs:
        began(job, gangs)
        (lost,) = (pod["metadata"]["name"] for pod in job.pods())
        operator.faults.power_cut("tpu-0")
        operator.faults.power_on("tpu-0")
        job.until_phase("Running", attempt=2)
        job.release()
        status = job.until_phase("Complete")
    ended = gangs.trainers[lost]
    assert (ended["exitCode"], ended["reason"]) in MADE_UP
    assert causes(status) == ["NodeFailure", RUNS]
    assert restarts(status) == {"NodeFailure": (1, 0)}
    assert status["attempts"][0]["node"] == "tpu-0"
    assert gangs.together == []
