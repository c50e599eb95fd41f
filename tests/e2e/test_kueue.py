"""Queue jobs with the real Kueue: one waits for the quota that another has."""

import json
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


def test_a_job_waits_for_the_quota_that_another_has(kueue: Cluster) -> None:
    first, second = (make_job(kueue, name, "low") for name in ("first", "second"))
    jobs = [first, second]
    namespaces = [job.name for job in jobs]
    try:
        apply_all(kueue, [first])
        kueue.kubectl("create", "namespace", second.name)
        second.kubectl("wait", "serviceaccount/default", "--for=create", "--timeout=60s")
        items = {"apiVersion": "v1", "kind": "List", "items": quota_for_one(namespaces)}
        kueue.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(items))

        first.until_phase("Running")
        assert condition(first.until(has_quota("True")), "QuotaReserved")["reason"] == "QuotaReserved"

        apply_job(second)
        second.until(has_quota("False"))
        second.until(lambda status: "insufficient" in condition(status, "QuotaReserved")["message"])
        assert second.until_phase("Queued")["attempts"] == []
        assert suspensions(kueue) == []
    finally:
        delete_all(kueue, jobs)


def has_quota(wanted: str) -> Any:
    return lambda status: condition(status, "QuotaReserved").get("status") == wanted


def suspensions(cluster: Cluster) -> list[str]:
    """Return the operator's writes to the JobSets of these jobs other than to make and delete them."""
    lines = cluster.audit_log.read_text(encoding="utf-8").splitlines()
    found = []
    for entry in map(json.loads, lines):
        ours = entry["user"]["username"].endswith(":stepkeeper-operator")
        if ours and entry["verb"] == "patch" and f"/{PREFIX}" in entry["requestURI"]:
            found += [entry["requestURI"]] if "/jobsets/" in entry["requestURI"] else []
    return found
