"""The operator in its image: what is in it, as whom it runs, and that it does nothing when there is nothing to do."""

import json
import time

import pytest

from stepcluster.api import Cluster
from stepcluster.product import NAMESPACE

pytestmark = pytest.mark.cluster

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:stepkeeper-operator"
SETTLE_S = 15
"""What follows from the end of the job is written within a few seconds; then the quiet begins."""

QUIET_S = 75
"""Longer than all that the operator does by the clock, but for those below."""

LONG_QUIET_S = 660
"""Longer than the resync of all jobs (10 minutes) and the life of a watch (4), too."""

WRITES = {"create", "update", "patch", "delete", "deletecollection"}
LEASE = "update leases stepkeeper-operator"


def requests(cluster: Cluster) -> list[dict[str, object]]:
    """The operator's requests so far, as the API server recorded them."""
    return cluster.audit_entries(ACCOUNT)


def settle(cluster: Cluster) -> None:
    """Wait until the operator has written nothing but its Lease for SETTLE_S seconds, for five minutes at most."""
    n_seen, ends_s = len(requests(cluster)), time.monotonic() + 300
    while time.monotonic() < ends_s:
        time.sleep(SETTLE_S)
        new = requests(cluster)[n_seen:]
        if all(told(entry) == LEASE for entry in new if entry["verb"] in WRITES):
            return
        n_seen += len(new)


def told(entry: dict[str, object]) -> str:
    reference = entry.get("objectRef") or {}
    assert isinstance(reference, dict)
    subresource = f"/{reference['subresource']}" if "subresource" in reference else ""
    return f"{entry['verb']} {reference.get('resource')}{subresource} {reference.get('name', '')}".strip()


def is_allowed(entry: dict[str, object]) -> bool:
    """Whether the operator's roles allow the request. They do for what a quota refuses."""
    annotations = entry.get("annotations") or {}
    assert isinstance(annotations, dict)
    return bool(annotations.get("authorization.k8s.io/decision") == "allow")


def manifest(name: str) -> dict[str, object]:
    """Return a job that ends at once."""
    trainer = {"name": "trainer", "image": "localhost/busybox:1", "command": ["true"]}
    spec = {
        "placement": {"hosts": {"count": 1}},
        "checkpoint": {"uri": f"file:///nowhere/{name}", "interval": {"every": {"steps": 1}}},
        "template": {"spec": {"containers": [trainer]}},
    }
    return {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "CheckpointedTrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_the_image_holds_the_wheel_and_no_torch(operator: Cluster) -> None:
    find = (
        "import importlib.util as u, stepkeeper_operator as o;"
        "print(o.__file__, u.find_spec('torch'), u.find_spec('torch_xla'))"
    )
    command = ("exec", "deployment/stepkeeper-operator", "--", "python", "-c", find)
    found = operator.kubectl("-n", NAMESPACE, *command).split()
    assert found == ["/opt/stepkeeper/stepkeeper_operator/__init__.py", "None", "None"]


@pytest.mark.timeout(LONG_QUIET_S + 1000)
@pytest.mark.parametrize("quiet_s", [QUIET_S, pytest.param(LONG_QUIET_S, marks=pytest.mark.long)])
def test_it_is_refused_nothing_and_writes_nothing_when_nothing_happens(
    operator: Cluster, quiet_s: int
) -> None:
    """The log has what other tests did, too: some restart the API server, which refuses requests as it begins."""
    start = len(requests(operator))
    operator.load_shell_image()
    operator.kubectl("apply", "-f", "-", stdin=json.dumps(manifest("quiet")))
    complete = ("--for=condition=Finished", "ctj/quiet", "--timeout=200s")
    operator.kubectl("wait", *complete, timeout_s=210)
    settle(operator)
    before = len(requests(operator))
    time.sleep(quiet_s)
    seen = requests(operator)
    refused = [told(entry) for entry in seen[start:] if not is_allowed(entry)]
    written = {told(entry) for entry in seen[before:] if entry["verb"] in WRITES}
    polled = {told(entry) for entry in seen[before:] if entry["verb"] == "get"}
    assert refused == []
    assert polled == set()
    assert written == {LEASE}
    operator.kubectl("delete", "ctj", "quiet")
