"""QueuedResources with the real operator: from the request to the last deletion, whatever the cloud does meanwhile.

Two machines join the cluster; all others exist in the Cloud TPU API only. Trainings on machines are in a file of their
own.
"""

import json
import time

import pytest

from stepcluster.api import Cluster
from stepcluster.errors import CommandError
from stepcluster.faults import OPERATOR_SELECTOR
from stepcluster.product import NAMESPACE
from stepcluster.shelljobs import PATIENCE_S, until
from stepcluster.vms.cloud_user import CloudUser
from stepcluster.vms.queued_resources import PAIR, V5P, V6E, QueuedResources, queued_resource

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

CREATE = "CreateQueuedResource"
OTHERS = {
    V5P: {"accelerator": "v5p", "topology": "2x2x1", "image": "v2-alpha-tpuv5"},
    V6E: {"accelerator": "v6e", "topology": "2x2", "image": "v2-alpha-tpuv6e"},
}
"""Nodes whose capacity and quota tests take away: nobody else is hurt."""

KEEP = {"recreatePolicy": {"onSuspended": "Keep", "onFailed": "Keep"}}
NEVER_S = 600.0
MANY = [50, pytest.param(200, marks=pytest.mark.long)]


@pytest.fixture
def machines_taken(resources: QueuedResources) -> None:
    """The pair is there, joined: no other resource gets machines."""
    resources.create(PAIR, slices={"count": 2}).until_condition("NodesJoined", "True")


@pytest.mark.usefixtures("machines_taken")
def test_quota_is_gone_and_comes_back(resources: QueuedResources) -> None:
    resources.set_quota(V5P, 0)
    resource = resources.create("quota", slices=OTHERS[V5P])
    status = resource.until_condition("QuotaExhausted", "True")
    assert status["state"] == "Pending"
    assert status["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert "Limit: 0 in zone us-west4-a" in resource.message("QuotaExhausted")
    assert "default-quota" not in resources.in_cloud()
    resources.set_quota(V5P, None)
    resource.until_state("Active")
    assert resource.condition("QuotaExhausted") == ("False", "AsExpected")
    assert resource.events().count("QuotaExhausted") == 1


@pytest.mark.usefixtures("machines_taken")
def test_a_request_that_is_refused_is_corrected_in_place(resources: QueuedResources) -> None:
    said = "there is no v5p in this zone"
    resources.cloud.do("inject_error", method=CREATE, code="INVALID_ARGUMENT", times=1, message=said)
    resource = resources.create("refused", slices=OTHERS[V5P])
    resource.until_condition("Accepted", "False", "Refused")
    assert said in resource.message("Accepted")
    resources.create("refused", slices=OTHERS[V6E], tier={"guaranteed": {}})
    resource.until_state("Active")
    assert resource.condition("Accepted") == ("True", "Accepted")
    with pytest.raises(CommandError, match="set updatePolicy: Recreate"):
        resources.create("refused", slices=OTHERS[V5P], tier={"guaranteed": {}})


@pytest.mark.usefixtures("machines_taken")
def test_what_exists_is_adopted_where_an_annotation_names_it_and_else_is_not_touched(
    resources: QueuedResources,
) -> None:
    somebody = CloudUser(resources.cloud.address)
    for name in ("matches", "unnamed"):
        somebody.create(f"default-{name}", labels={"team": "blue"})
    somebody.create("default-differs", runtime_version="v2-alpha-tpuv5")
    resources.cloud.do("forget_calls")
    no_script = {"startupScriptSecretRef": None}
    for name in ("matches", "differs"):
        manifest = queued_resource(name, slices=no_script)
        manifest["metadata"]["annotations"] = {"stepkeeper.dev/adopt": f"default-{name}"}
        resources.apply(manifest)
    matches, differs = resources.find("matches"), resources.find("differs")
    unnamed = resources.create("unnamed", slices=no_script)
    assert matches.until_state("Active")["operator"]["adopted"]
    differs.until_condition("Accepted", "False", "SpecMismatch")
    differing = "image: the spec has v2-alpha-tpuv5-lite, the cloud has v2-alpha-tpuv5"
    assert differing in differs.message("Accepted")
    unnamed.until_condition("Accepted", "False", "OwnedByOther")
    assert "stepkeeper.dev/adopt: default-unnamed" in unnamed.message("Accepted")
    resources.delete(["matches", "differs", "unnamed"])
    left = {cloud_id: state for cloud_id, state in resources.in_cloud().items() if PAIR not in cloud_id}
    for cloud_id in left:
        somebody.delete(cloud_id)
    assert left == {"default-differs": "ACTIVE", "default-unnamed": "ACTIVE"}
    # A list from just before they were made may lead to a request: the API refuses it, for the name is taken.
    answers = {call["code"] for call in resources.cloud.calls() if call["method"] == CREATE}
    assert answers <= {"ALREADY_EXISTS"}


@pytest.mark.usefixtures("machines_taken")
@pytest.mark.parametrize("n_many", MANY)
def test_many_at_once_are_looked_at_by_lists(resources: QueuedResources, n_many: int) -> None:
    names = [f"many-{index:03}" for index in range(n_many)]
    items = {"apiVersion": "v1", "kind": "List", "items": [queued_resource(name) for name in names]}
    resources.cloud.do("forget_calls")
    resources.cluster.kubectl("create", "-f", "-", stdin=json.dumps(items))

    active = ("--for=jsonpath={.status.state}=Active", f"--timeout={2 * PATIENCE_S:g}s")
    resources.cluster.kubectl("wait", "qr", *names, *active, timeout_s=2 * PATIENCE_S + 10)
    assert {f"default-{name}" for name in names} <= resources.in_cloud().keys()
    assert len(resources.cluster.vms.names()) == 2
    counts = resources.cloud.counts()
    assert counts[CREATE] == n_many
    assert not {"GetQueuedResource", "GetNode"} & counts.keys()

    resources.cloud.do("forget_calls")
    begin = time.monotonic()
    until(lambda: resources.cloud.counts().get("ListQueuedResources", 0) >= 5, seen=lambda: "no lists")
    calls, elapsed_s = resources.cloud.calls(), time.monotonic() - begin
    assert {call["method"] for call in calls} == {"ListQueuedResources", "ListNodes"}
    # One round in two seconds; a little sooner, where one of them looks a little sooner.
    assert len(calls) <= 2 * (elapsed_s / 1.5 + 2)
    resources.delete(names)
    assert set(resources.in_cloud()) == {f"default-{PAIR}"}


@pytest.mark.usefixtures("machines_taken")
def test_an_operator_killed_before_it_hears_of_its_creation_makes_no_second(
    resources: QueuedResources,
) -> None:
    resources.cloud.do("hold", method=CREATE, after_commit=True)
    resource = resources.create("killed")
    until(lambda: "default-killed" in resources.in_cloud(), seen=lambda: str(resource.status()))
    status = resource.status()
    assert status["operator"]["created"]
    assert "operation" not in status
    n_before = count_operator_starts(resources.cluster)
    resources.cluster.faults.kill_operator()
    until(lambda: count_operator_starts(resources.cluster) > n_before, seen=lambda: "no new operator")
    resources.cloud.do("release", method=CREATE)
    status = resource.until_state("Active")
    assert [cloud_id for cloud_id in resources.in_cloud() if "killed" in cloud_id] == ["default-killed"]
    assert [node for node in resources.cloud_nodes() if "killed" in node] == ["default-killed"]
    assert status.get("recreations", 0) == 0
    first = next(call for call in resources.cloud.calls() if "killed" in call["resource"])
    assert (first["method"], first["code"]) == (CREATE, ""), "its answer has never come"


def count_operator_starts(cluster: Cluster) -> int:
    options = ("-l", OPERATOR_SELECTOR, "-o", "jsonpath={.items[0].status.containerStatuses[0].restartCount}")
    return int(cluster.kubectl("-n", NAMESPACE, "get", "pods", *options))


@pytest.mark.usefixtures("machines_taken")
def test_nothing_is_left_of_a_resource_that_is_deleted_in_any_state(resources: QueuedResources) -> None:
    """The pair goes last, and with it all machines that have joined."""
    cloud, made = resources.cloud, bring_into_all_states(resources)
    assert resources.in_cloud() == {
        f"default-{name}": state for name, state in made.items() if state != "none"
    }
    assert len(resources.list_joined(PAIR)) == 2
    resources.delete(made)
    assert resources.in_cloud() == {}
    assert resources.cloud_nodes() == []
    assert resources.list_joined(PAIR) == {}
    until(lambda: resources.cluster.vms.names() == (), seen=lambda: str(cloud.hook_runs()))


def bring_into_all_states(resources: QueuedResources) -> dict[str, str]:
    """Create a resource for each state that the cloud has, and return these states by name."""
    cloud = resources.cloud
    provided = ["fails", "suspended", "suspending", "deleting"]
    cloud.do("inject_error", method=CREATE, code="PERMISSION_DENIED", resource="default-refused")
    resources.set_capacity(V6E, 0)
    resources.apply(*(queued_resource(name, **KEEP) for name in provided))
    resources.create("refused").until_condition("Accepted", "False", "Refused")
    resources.create("waiting", slices=OTHERS[V6E]).until_state("WaitingForResources")
    for name in provided:
        resources.find(name).until_state("Active")
    cloud.do("fail", queued_resource="default-fails", code="INTERNAL", message="no machine is well")
    resources.find("fails").until_state("Failed")
    cloud.do("preempt", node="default-suspended")
    resources.find("suspended").until_state("Suspended")
    cloud.do("set_timings", suspending_s=NEVER_S)
    cloud.do("preempt", node="default-suspending")
    resources.find("suspending").until_state("Suspending")
    for name, timing, state in (
        ("provisioning", "provisioning_s", "Provisioning"),
        ("accepted", "accepted_s", "Accepted"),
        ("creating", "creating_s", "Creating"),
    ):
        cloud.do("set_timings", **{timing: NEVER_S})
        resources.create(name).until_state(state)
    cloud.do("set_timings", deleting_s=20)
    CloudUser(cloud.address).delete("default-deleting")
    cloud.do("set_timings", deleting_s=1)
    return {
        "fails": "FAILED",
        "suspended": "SUSPENDED",
        "suspending": "SUSPENDING",
        "deleting": "DELETING",
        "refused": "none",
        "waiting": "WAITING_FOR_RESOURCES",
        "provisioning": "PROVISIONING",
        "accepted": "ACCEPTED",
        "creating": "CREATING",
        PAIR: "ACTIVE",
    }
