"""QueuedResources with the real operator: from the request to the last deletion, whatever the cloud does meanwhile.

Two machines at a time join the cluster; all others exist in the Cloud TPU API only.
"""

import datetime as dt
import json
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.kubectl import Kubectl
from demo.watch import Event, PodStarted, StepPrinted, Watch
from demo_tpu.undisturbed import UndisturbedRun
from stepcluster.api import Cluster
from stepcluster.faults import OPERATOR_SELECTOR
from stepcluster.product import NAMESPACE
from stepcluster.vms.cloud_user import CloudUser
from stepcluster.vms.queued_resources import (
    PATIENCE_S,
    ClusterObject,
    QueuedResources,
    queued_resource,
    wait_until,
)
from stepcluster.vms.tpu_cloud import TIMINGS
from stepkeeper.log import Log, LogState
from stepkeeper.storage import open_store
from tpuapi.clients import PROJECT, ZONE
from tpuapi.remote import RemoteTpu

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAIR = "pair"
"""The resource whose two slices are real machines, so that all others exist in the API only."""

CREATE = "CreateQueuedResource"
V5E, V5P, V6E = "v5litepod", "v5p", "v6e"
OTHERS = {
    V5P: {"acceleratorType": "v5p-8", "runtimeVersion": "v2-alpha-tpuv5"},
    V6E: {"acceleratorType": "v6e-4", "runtimeVersion": "v2-alpha-tpuv6e"},
}
"""Nodes whose capacity and quota tests take away: nobody else is hurt."""

KEEP = {"recreatePolicy": {"onSuspended": "Keep", "onFailed": "Keep"}}
NEVER_S = 600.0
N_MANY = 200
N_STEPS = 60


@pytest.fixture
def resources(cluster: Cluster, tpu_cloud: RemoteTpu) -> Iterator[QueuedResources]:
    """The cloud as it is at first, with the pair at most."""
    made = QueuedResources(cluster=cluster, cloud=tpu_cloud)
    yield made
    tpu_cloud.do("clear_faults")
    tpu_cloud.do("set_timings", **TIMINGS, accepted_s=0)
    for accelerator in (V5E, V5P, V6E):
        tpu_cloud.do("set_capacity", zone=ZONE, accelerator=accelerator, cores=None)
        set_quota(made, accelerator, None)
    left = made.list_objects().keys() - {PAIR}
    if left:
        # Objects may take a while longer: after an answer that was lost, nobody knows what else is on its way.
        cluster.kubectl("delete", "qr", *left, "--wait=false")
        wait_until(lambda: made.in_cloud().keys() <= {f"default-{PAIR}"}, lambda: str(made.in_cloud()))


@pytest.fixture
def machines_taken(resources: QueuedResources) -> None:
    """The pair is there, joined: no other resource gets machines."""
    resources.create(PAIR, node={"count": 2}).until_condition("NodesJoined", "True")


def set_quota(resources: QueuedResources, accelerator: str, cores: int | None) -> None:
    resources.cloud.do(
        "set_quota", project=PROJECT, zone=ZONE, accelerator=accelerator, cores=cores, preemptible=True
    )


def job_manifest(resource: str) -> dict[str, Any]:
    """The example's job, on the machines of a resource. Only what is asked for and told saves it."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "text_lm" / "job.yaml").read_text())
    job["metadata"]["name"] = "on-machines"
    spec = job["spec"]
    spec["placement"] = {
        "tpu": {"accelerator": "v5e", "topology": "2x2", "queuedResourceName": resource},
    }
    spec["totalSteps"] = N_STEPS
    spec["checkpoint"] |= {
        "uri": f"gs://checkpoints/on-machines-{time.time_ns()}",
        "interval": {"steps": 100 * N_STEPS},
    }
    spec["template"]["spec"]["containers"][0]["args"] += ["--steps", str(N_STEPS), "--pause-seconds", "0.3"]
    return job


class Lines:
    """What the trainers of a job print, pod by pod, as long as they are watched."""

    def __init__(self, events: "queue.SimpleQueue[Event]") -> None:
        self._events = events
        self.losses: dict[int, set[str]] = {}
        """By step; more than one if it was done again with another loss."""
        self.pods: dict[str, list[int]] = {}
        """Steps of each pod that did some."""
        self.nodes: dict[str, str] = {}

    def read(self) -> None:
        """Take in what has come."""
        while not self._events.empty():
            match self._events.get():
                case PodStarted() as started:
                    self.nodes[started.pod] = started.node
                case StepPrinted() as line:
                    self.losses.setdefault(line.step, set()).add(line.exact)
                    self.pods.setdefault(line.pod, []).append(line.step)
                case _:
                    pass

    def last_step(self) -> int:
        self.read()
        return max(self.losses, default=0)


def read_log(uri: str) -> LogState:
    store = open_store(uri)
    try:
        return Log(store).open()
    finally:
        store.close()


def wait_provided(resource: ClusterObject, cloud_id: str) -> dict[str, Any]:
    """Wait until the hosts of this cloud resource have joined."""
    resource.until(lambda status: str(status.get("cloudName")).endswith(f"/{cloud_id}"))
    return resource.until_condition("NodesJoined", "True")


@pytest.mark.timeout(900)
def test_machines_come_are_taken_away_and_come_again_and_the_training_goes_on_exactly(
    resources: QueuedResources,
    trainer_image: str,
    object_storage: None,
    tmp_path: Path,
) -> None:
    cluster, cloud = resources.cluster, resources.cloud
    manifest = job_manifest("story")
    name, uri = manifest["metadata"]["name"], manifest["spec"]["checkpoint"]["uri"]
    job = ClusterObject(cluster=cluster, kind="ctj", name=name)
    with (
        UndisturbedRun(tmp_path, N_STEPS) as undisturbed,
        Watch(Kubectl(environment=cluster.environment), job=name, uri=uri) as watch,
    ):
        lines = Lines(watch.events)
        cloud.do("set_capacity", zone=ZONE, accelerator=V5E, cores=0)
        # Longer than the operator looks away from a request that waits.
        cloud.do("set_timings", provisioning_s=8)
        resources.apply(manifest)
        resource = resources.create("story", node={"autocheckpointEnabled": True})
        resource.until_state("WaitingForResources")
        job.until_condition("Suspended", "True", "WaitingForQueuedResource")
        cloud.do("set_capacity", zone=ZONE, accelerator=V5E, cores=None)
        resource.until_state("Provisioning")
        resource.until_state("Active")
        cloud.do("set_timings", **TIMINGS)
        wait_provided(resource, "default-story")
        (first_machine,) = resources.list_joined("story")

        wait_until(lambda: lines.last_step() > 1, lambda: json.dumps(job.status(), indent=1))
        assert read_log(uri).latest is None
        announced_s = time.time()
        cloud.do("announce_maintenance", node="default-story", starts_in_s=110)
        asked = job.until(lambda status: "sequence" in status["checkpoint"].get("lastRequest", {}))
        assert resource.condition("MaintenanceScheduled") == ("True", "Pending")
        saved = read_log(uri).latest
        assert saved is not None
        assert asked["checkpoint"]["lastRequest"]["step"] == saved.step
        assert saved.step < N_STEPS
        assert "SaveRequested" in job.events()
        assert time.time() < announced_s + 110

        cloud.do("preempt", node="default-story")
        wait_provided(resource, "default-story-r1")
        (second_machine,) = resources.list_joined("story")
        assert second_machine != first_machine
        assert resources.in_cloud() == {"default-story-r1": "ACTIVE"}
        status = job.until(lambda found: found["phase"] == "Complete", timeout_s=2 * PATIENCE_S)
        wait_until(lambda: lines.last_step() == N_STEPS, lambda: str(lines.pods))
        losses = undisturbed.losses()

    before, after = lines.pods
    assert (lines.nodes[before], lines.nodes[after]) == (first_machine, second_machine)
    resumed_from = lines.pods[after][0] - 1
    assert status["checkpoint"]["restored"]["step"] == status["attempts"][-1]["fromStep"] == resumed_from
    assert resumed_from in {record.step for record in read_log(uri).commits.values()}
    assert saved.step <= resumed_from <= lines.pods[before][-1]
    assert {step: {loss} for step, loss in losses.items()} == lines.losses
    assert {attempt.get("cause") for attempt in status["attempts"][:-1]} == {"SpotPreemption"}
    assert status["restarts"] == {
        "total": 1,
        "byCause": [{"cause": "SpotPreemption", "count": 1, "countedTowardsLimit": 0}],
    }
    assert {"WaitingForResources", "Provisioning", "Active", "Preempted"} <= set(resource.events())
    cluster.kubectl("delete", "ctj", name)


@pytest.mark.usefixtures("machines_taken")
def test_quota_is_gone_and_comes_back(resources: QueuedResources) -> None:
    set_quota(resources, V5P, 0)
    resource = resources.create("quota", node=OTHERS[V5P])
    status = resource.until_condition("QuotaExhausted", "True")
    assert status["state"] == "Pending"
    assert status["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert "Limit: 0 in zone us-west4-a" in resource.message("QuotaExhausted")
    assert "default-quota" not in resources.in_cloud()
    set_quota(resources, V5P, None)
    resource.until_state("Active")
    assert resource.condition("QuotaExhausted") == ("False", "QuotaSuffices")
    assert resource.events().count("QuotaExhausted") == 1


@pytest.mark.usefixtures("machines_taken")
def test_an_expired_request_is_removed(resources: QueuedResources) -> None:
    resources.cloud.do("set_capacity", zone=ZONE, accelerator=V6E, cores=0)
    until = dt.datetime.now(tz=dt.UTC) + dt.timedelta(seconds=10)
    queueing = {"validUntilTime": until.strftime("%Y-%m-%dT%H:%M:%SZ")}
    resource = resources.create("expires", node=OTHERS[V6E], queueing=queueing, **KEEP)
    resource.until_state("WaitingForResources")
    resource.until_state("Gone")
    assert "Expired" in resource.events()
    assert "default-expires" not in resources.in_cloud()


@pytest.mark.usefixtures("machines_taken")
def test_what_exists_is_adopted_if_it_matches_and_else_is_not_touched(resources: QueuedResources) -> None:
    somebody = CloudUser(resources.cloud.address)
    somebody.create("default-matches", labels={"team": "blue"})
    somebody.create("default-differs", runtime_version="v2-alpha-tpuv5", tags=["web"])
    resources.cloud.do("forget_calls")
    no_script = {"startupScriptSecretRef": None}
    matches = resources.create("matches", node=no_script)
    differs = resources.create("differs", node={**no_script, "tags": ["training"]})
    assert matches.until_state("Active")["bookkeeping"]["adopted"]
    differs.until_condition("Accepted", "False", "Differs")
    for told in (
        "node.runtimeVersion: asked for v2-alpha-tpuv5-lite, the cloud has v2-alpha-tpuv5",
        "node.tags: asked for training, the cloud has web",
    ):
        assert told in differs.message("Accepted")
    resources.delete(["matches", "differs"])
    left = {cloud_id: state for cloud_id, state in resources.in_cloud().items() if PAIR not in cloud_id}
    somebody.delete("default-differs")
    assert left == {"default-differs": "ACTIVE"}
    # A list from just before they were made may lead to a request: the API refuses it, for the name is taken.
    answers = {call["code"] for call in resources.cloud.calls() if call["method"] == CREATE}
    assert answers <= {"ALREADY_EXISTS"}


@pytest.mark.usefixtures("machines_taken")
def test_two_hundred_at_once_are_looked_at_by_lists(resources: QueuedResources) -> None:
    names = [f"many-{index:03}" for index in range(N_MANY)]
    items = {"apiVersion": "v1", "kind": "List", "items": [queued_resource(name) for name in names]}
    resources.cloud.do("forget_calls")
    resources.cluster.kubectl("create", "-f", "-", stdin=json.dumps(items))

    active = ("--for=jsonpath={.status.state}=Active", f"--timeout={2 * PATIENCE_S:g}s")
    resources.cluster.kubectl("wait", "qr", *names, *active, timeout_s=2 * PATIENCE_S + 10)
    assert {f"default-{name}" for name in names} <= resources.in_cloud().keys()
    assert len(resources.cluster.vms.names()) == 2
    counts = resources.cloud.counts()
    assert counts[CREATE] == N_MANY
    assert not {"GetQueuedResource", "GetNode"} & counts.keys()

    resources.cloud.do("forget_calls")
    begin = time.monotonic()
    wait_until(lambda: resources.cloud.counts().get("ListQueuedResources", 0) >= 5, lambda: "no lists")
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
    wait_until(lambda: "default-killed" in resources.in_cloud(), lambda: str(resource.status()))
    status = resource.status()
    assert status["bookkeeping"]["created"]
    assert "operation" not in status
    n_before = count_operator_starts(resources.cluster)
    resources.cluster.faults.kill_operator()
    wait_until(lambda: count_operator_starts(resources.cluster) > n_before, lambda: "no new operator")
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
    wait_until(lambda: resources.cluster.vms.names() == (), lambda: str(cloud.hook_runs()))


def bring_into_all_states(resources: QueuedResources) -> dict[str, str]:
    """Create a resource for each state that the cloud has, and return these states by name."""
    cloud = resources.cloud
    provided = ["fails", "suspended", "suspending", "deleting"]
    cloud.do("inject_error", method=CREATE, code="PERMISSION_DENIED", resource="default-refused")
    cloud.do("set_capacity", zone=ZONE, accelerator=V6E, cores=0)
    resources.apply(*(queued_resource(name, **KEEP) for name in provided))
    resources.create("refused").until_condition("Accepted", "False", "Refused")
    resources.create("waiting", node=OTHERS[V6E]).until_state("WaitingForResources")
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
