"""Queue jobs with the real Kueue: one waits for quota, is preempted by a more important one, or leaves the queue."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest

from stepcluster.api import Cluster
from stepcluster.product import install_operator
from stepcluster.shelljobs import ShellJob, causes, condition, container, delete_all

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(2400)]

PREFIX: Final = "kueue-"
SAID: Final = json.dumps(
    {
        "code": 75,
        "notice": "sigterm",
        "step": 120,
        "root": "r",
        "claim": 1,
        "committed": {"sequence": 7, "step": 120},
    }
)
SAVES: Final = (
    f"trap 'printf %s {json.dumps(SAID)} > /dev/termination-log; exit 75' TERM; "
    "until [ -e /tmp/go ]; do sleep 0.2; done"
)
"""Says on SIGTERM that it saved, as a training does."""


def kueue_object(kind: str, name: str, namespace: str | None = None, **body: Any) -> dict[str, Any]:
    meta = {"name": name} | ({} if namespace is None else {"namespace": namespace})
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": meta, **body}


def quota_for_one() -> list[dict[str, Any]]:
    """A ClusterQueue in which one job has room."""
    cpu = {"name": "cpu", "nominalQuota": "150m"}
    group = {"coveredResources": ["cpu"], "flavors": [{"name": "any", "resources": [cpu]}]}
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    return [
        kueue_object("ResourceFlavor", "any"),
        kueue_object("ClusterQueue", "one", spec=spec),
        kueue_object("WorkloadPriorityClass", "low", value=10, description="may be preempted"),
        kueue_object("WorkloadPriorityClass", "high", value=1000, description="preempts"),
    ]


@pytest.fixture(scope="module")
def kueue(operator: Cluster) -> Iterator[Cluster]:
    """Kueue, which is installed after the operator: that finds it at its next resync."""
    install_operator(operator, reportIntervalSeconds=2, resyncSeconds=10)
    operator.load_shell_image()
    operator.start_kueue()
    apply(operator, quota_for_one())
    yield operator
    for kind in ("mutating", "validating"):
        name = f"kueue-{kind}-webhook-configuration"
        operator.kubectl("delete", f"{kind}webhookconfiguration", name, "--ignore-not-found")
    install_operator(operator, reportIntervalSeconds=2)


def apply(cluster: Cluster, items: list[dict[str, Any]]) -> None:
    body = {"apiVersion": "v1", "kind": "List", "items": items}
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(body))


@contextlib.contextmanager
def namespaces_of(cluster: Cluster, *jobs: ShellJob) -> Iterator[None]:
    """Make the jobs' namespaces, each with its LocalQueue. They go with all that is in them."""
    spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.name}} for job in jobs]
    apply(cluster, spaces)
    try:
        for job in jobs:
            job.kubectl("wait", "serviceaccount/default", "--for=create", "--timeout=60s")
        apply(
            cluster, [kueue_object("LocalQueue", "q", job.name, spec={"clusterQueue": "one"}) for job in jobs]
        )
        yield
    finally:
        delete_all(cluster, jobs)


def make_job(cluster: Cluster, name: str, priority: str) -> ShellJob:
    labels = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": priority}
    trainer = container("trainer", SAVES, resources={"requests": {"cpu": "100m"}})
    pod = {"terminationGracePeriodSeconds": 20}
    return ShellJob(
        cluster=cluster, name=PREFIX + name, containers=[trainer], pod=pod, labels=labels, max_failures=0
    )


def start(job: ShellJob) -> None:
    job.kubectl("apply", "-f", "-", stdin=json.dumps(job.manifest()))


def suspend(job: ShellJob, *, suspended: bool) -> None:
    patch = json.dumps({"spec": {"suspend": suspended}})
    job.kubectl("patch", "ctj", job.name, "--type=merge", "-p", patch)


def has_quota(wanted: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda status: condition(status, "QuotaReserved").get("status") == wanted


def test_a_more_important_job_preempts_one_that_saves_and_resumes_when_it_is_done(kueue: Cluster) -> None:
    low, high = (make_job(kueue, name, name) for name in ("low", "high"))
    with namespaces_of(kueue, low, high):
        start(low)
        low.until_phase("Running")

        start(high)
        high.until_phase("Running")
        status = low.until_phase("Queued")
        assert causes(status) == ["QueuePreemption"]
        assert "Preempted" in status["attempts"][0]["message"]
        assert status["checkpoint"]["latest"].items() >= {"sequence": 7, "step": 120}.items()
        assert has_quota("False")(status)

        high.finish()
        low.until_phase("Running", attempt=2)
        status = low.finish()
        assert causes(status) == ["QueuePreemption", None]
        assert status["restarts"]["byCause"] == [
            {"cause": "QueuePreemption", "count": 1, "countedTowardsLimit": 0}
        ]
        assert suspensions(kueue) == []


def test_a_job_that_its_user_suspends_leaves_its_place_to_the_next_and_queues_again(kueue: Cluster) -> None:
    left, next_one = (make_job(kueue, name, "low") for name in ("left", "next"))
    with namespaces_of(kueue, left, next_one):
        start(left)
        left.until_phase("Running")
        assert condition(left.until(has_quota("True")), "QuotaReserved")["reason"] == "QuotaReserved"
        start(next_one)
        next_one.until(lambda status: "insufficient" in condition(status, "QuotaReserved").get("message", ""))
        status = next_one.until_phase("Queued")
        assert has_quota("False")(status)
        assert status.get("attempts", []) == []

        suspend(left, suspended=True)
        left.until(lambda status: condition(status, "QuotaReserved").get("reason") == "NotQueued")
        next_one.until_phase("Running")
        status = left.until_phase("Suspended")
        assert causes(status) == ["Requested"]
        assert status["checkpoint"]["latest"].items() >= {"sequence": 7, "step": 120}.items()
        assert left.jobset_uid() == ""
        assert left.get("workloads.kueue.x-k8s.io")["items"] == []

        suspend(left, suspended=False)
        left.until_phase("Queued")
        next_one.finish()
        left.until_phase("Running", attempt=2)
        assert causes(left.finish()) == ["Requested", None]
        assert suspensions(kueue) == []


def suspensions(cluster: Cluster) -> list[str]:
    """Return the operator's writes to the JobSets of these jobs other than to make and delete them."""
    found = []
    for entry in cluster.audit_entries():
        ours = entry["user"].get("username", "").endswith(":stepkeeper-operator")
        if ours and entry["verb"] == "patch" and f"/{PREFIX}" in entry["requestURI"]:
            found += [entry["requestURI"]] if "/jobsets/" in entry["requestURI"] else []
    return found
