"""Queue jobs with the real Kueue: one waits for quota, another takes it away, and what it stopped resumes."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from stepcluster.api import Cluster
from stepcluster.product import install_operator
from stepcluster.shelljobs import ShellJob, apply_all, container, delete_all

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


def quota_for_one(namespaces: list[str]) -> list[dict[str, Any]]:
    """A ClusterQueue in which one job has room, and a LocalQueue of it in each namespace."""
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
        *(kueue_object("LocalQueue", "q", name, spec={"clusterQueue": "one"}) for name in namespaces),
    ]


@pytest.fixture(scope="module")
def kueue(operator: Cluster) -> Iterator[Cluster]:
    """Kueue, which is installed after the operator: that finds it at its next resync."""
    install_operator(operator, reportIntervalSeconds=2, resyncSeconds=10)
    operator.load_shell_image()
    operator.start_kueue()
    yield operator
    for kind in ("mutating", "validating"):
        name = f"kueue-{kind}-webhook-configuration"
        operator.kubectl("delete", f"{kind}webhookconfiguration", name, "--ignore-not-found")
    install_operator(operator, reportIntervalSeconds=2)


def make_job(cluster: Cluster, name: str, priority: str) -> ShellJob:
    labels = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": priority}
    trainer = container("trainer", SAVES, resources={"requests": {"cpu": "100m"}})
    pod = {"terminationGracePeriodSeconds": 20}
    return ShellJob(cluster=cluster, name=PREFIX + name, containers=[trainer], pod=pod, labels=labels)


def condition(status: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return next((dict(item) for item in status.get("conditions", ()) if item["type"] == kind), {})


def apply_job(job: ShellJob) -> None:
    job.kubectl("apply", "-f", "-", stdin=json.dumps(job.manifest()))


def test_a_job_waits_for_quota_is_preempted_with_a_save_and_resumes(kueue: Cluster) -> None:
    first, second, urgent = (
        make_job(kueue, name, priority)
        for name, priority in (("first", "low"), ("second", "low"), ("urgent", "high"))
    )
    jobs = [first, second, urgent]
    namespaces = [job.name for job in jobs]
    try:
        apply_all(kueue, [first])
        for name in namespaces[1:]:
            kueue.kubectl("create", "namespace", name)
            wait = ("wait", "serviceaccount/default", "--for=create", "--timeout=60s")
            kueue.kubectl("-n", name, *wait)
        items = {"apiVersion": "v1", "kind": "List", "items": quota_for_one(namespaces)}
        kueue.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(items))

        status = first.until_phase("Running")
        assert condition(first.until(has_quota("True")), "QuotaReserved")["reason"] == "QuotaReserved"

        apply_job(second)
        status = second.until(has_quota("False"))
        assert second.until_phase("Queued")["attempts"] == []
        assert "insufficient" in condition(status, "QuotaReserved")["message"]

        apply_job(urgent)
        urgent.until_phase("Running")
        status = first.until_phase("Queued")
        (attempt,) = status["attempts"]
        assert attempt["cause"] == "QueuePreemption"
        assert "reempted" in attempt["message"]
        assert status["checkpoint"]["latest"]["sequence"] == 7
        assert {entry["cause"] for entry in status["restarts"]["byCause"]} <= {"QueuePreemption"}

        # It leaves the queue, so that the first is next.
        suspend(second, True)
        second.until_phase("Suspended")
        second.until(lambda _status: second.jobset_uid() == "")

        uid = first.jobset_uid()
        urgent.release()
        urgent.until_phase("Complete")
        first.until_phase("Running", attempt=2)
        assert first.jobset_uid() == uid
        first.release()
        first.until_phase("Complete")

        suspend(second, False)
        second.until_phase("Running")
        suspend(second, True)
        status = second.until_phase("Suspended")
        assert [entry["message"] for entry in status["attempts"]] == ["suspended"]
        time.sleep(5)  # Kueue would have taken it back by now
        assert second.status()["phase"] == "Suspended"
        assert suspensions(kueue) == []
    finally:
        delete_all(kueue, jobs)


def has_quota(wanted: str) -> Any:
    return lambda status: condition(status, "QuotaReserved").get("status") == wanted


def suspend(job: ShellJob, wanted: bool) -> None:
    job.kubectl("patch", "ctj", job.name, "--type=merge", "-p", json.dumps({"spec": {"suspend": wanted}}))


def suspensions(cluster: Cluster) -> list[str]:
    """Return the operator's writes to the JobSets of these jobs other than to make and delete them."""
    lines = cluster.audit_log.read_text(encoding="utf-8").splitlines()
    found = []
    for entry in map(json.loads, lines):
        ours = entry["user"]["username"].endswith(":stepkeeper-operator")
        if ours and entry["verb"] == "patch" and f"/{PREFIX}" in entry["requestURI"]:
            found += [entry["requestURI"]] if "/jobsets/" in entry["requestURI"] else []
    return found
