"""Trainings on the machines of a QueuedResource: they wait, save, lose them, and go on on others, exactly."""

import contextlib
import json
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.kubectl import Kubectl
from demo.watch import PodStarted, StepPrinted, Watch
from demo_tpu.undisturbed import UndisturbedRun
from stepcluster.api import Cluster
from stepcluster.overlay import for_test_cluster
from stepcluster.shelljobs import PATIENCE_S, until
from stepcluster.vms.queued_resources import V5E, ClusterObject, QueuedResources
from stepcluster.vms.tpu_cloud import TIMINGS
from stepkeeper.log import Log, LogState
from stepkeeper.storage import open_store

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("trainer_image", "object_storage"),
]

ROOT = Path(__file__).parents[2]
N_STEPS, N_STEPS_SHARED = 60, 100
NOTICE_S = 110.0
"""Less than two minutes, so that the operator asks at once."""

GUARANTEED: dict[str, Any] = {"slices": {"count": 2}, "tier": {"guaranteed": {}}}
AUTOCHECKPOINT_GRACE_S = 300


class Training:
    """A job, and what its trainers print, pod by pod, as long as it is watched."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        resource: str,
        n_steps: int,
        pause_s: float = 0.5,
        own_grace: bool = True,
    ) -> None:
        """Describe it. Without a grace of its own, its pods have as long as their machines leave them."""
        self.cluster = cluster
        self.n_steps = n_steps
        self.uri = f"gs://checkpoints/{name}-{time.time_ns()}"
        self.job = ClusterObject(cluster=cluster, kind="ctj", name=name)
        self.manifest = self._describe(resource, pause_s)
        if not own_grace:
            del self.manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        self.losses: dict[int, set[str]] = {}
        """By step; more than one if it was done again with another loss."""
        self.pods: dict[str, list[int]] = {}
        """Steps of each pod that did some."""
        self.nodes: dict[str, str] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch it, and delete its job in the end."""
        kubectl = Kubectl(environment=self.cluster.environment)
        try:
            with Watch(kubectl, job=self.job.name, uri=self.uri) as watch:
                self._events = watch.events
                yield
        finally:
            self.cluster.kubectl("delete", "ctj", self.job.name, "--ignore-not-found")

    def last_step(self, *, of_pod: int) -> int:
        """Return the last step that its n-th pod has printed; 0 before the first."""
        while not self._events.empty():
            match self._events.get():
                case PodStarted() as started:
                    self.nodes[started.pod] = started.node
                case StepPrinted() as line:
                    self.losses.setdefault(line.step, set()).add(line.exact)
                    self.pods.setdefault(line.pod, []).append(line.step)
                case _:
                    pass
        steps = list(self.pods.values())[of_pod - 1 : of_pod]
        return max(steps[0]) if steps else 0

    def until_trains(self, *, pod: int = 1) -> None:
        """Wait until its n-th pod has done two steps."""

        def is_so() -> bool:
            self.last_step(of_pod=pod)
            return len(self.pods) >= pod and len(list(self.pods.values())[pod - 1]) > 1

        until(is_so, seen=lambda: json.dumps(self.job.status(), indent=1))

    def until_complete(self) -> dict[str, Any]:
        """Wait until all its steps are done, and return its status."""
        status = self.job.until(lambda found: found["phase"] == "Complete", timeout_s=2 * PATIENCE_S)
        until(lambda: self.last_step(of_pod=len(self.pods)) == self.n_steps, seen=lambda: str(self.pods))
        return status

    def until_saved_ahead(self) -> int:
        """Wait until a commit has answered the operator's request, and return its step."""
        asked = self.job.until(lambda status: "sequence" in status["checkpoint"].get("lastRequest", {}))
        assert "SaveRequested" in self.job.events()
        return int(asked["checkpoint"]["lastRequest"]["step"])

    def read_graces(self) -> tuple[int, int]:
        """Return the grace period of its pod, and the part of it that its trainer is told to count on."""
        selector = f"jobset.sigs.k8s.io/jobset-name={self.job.name}"
        (pod,) = json.loads(self.cluster.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        env = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
        return pod["spec"]["terminationGracePeriodSeconds"], int(env["STEPKEEPER_GRACE_S"])

    def read_log(self) -> LogState:
        store = open_store(self.uri)
        try:
            return Log(store).open()
        finally:
            store.close()

    def _describe(self, resource: str, pause_s: float) -> dict[str, Any]:
        """Return the example's job, on the machines of a resource. Only what is asked for and told saves it."""
        job = for_test_cluster(yaml.safe_load((ROOT / "examples" / "text_lm" / "job.yaml").read_text()))
        job["metadata"]["name"] = self.job.name
        spec = job["spec"]
        spec["placement"] = {
            "tpu": {"accelerator": "v5e", "topology": "2x2", "queuedResourceName": resource},
        }
        spec["totalSteps"] = self.n_steps
        spec["checkpoint"] |= {"uri": self.uri, "interval": {"every": {"steps": 100 * self.n_steps}}}
        arguments = ["--steps", str(self.n_steps), "--pause-seconds", str(pause_s)]
        spec["template"]["spec"]["containers"][0]["args"] += arguments
        return job


def wait_provided(resource: ClusterObject, cloud_id: str) -> None:
    """Wait until the hosts of this cloud resource have joined."""
    resource.until(lambda status: str(status.get("cloudName")).endswith(f"/{cloud_id}"))
    resource.until_condition("NodesJoined", "True")


def test_machines_come_are_taken_away_and_come_again_and_the_training_goes_on_exactly(
    resources: QueuedResources, tmp_path: Path
) -> None:
    cloud = resources.cloud
    training = Training(resources.cluster, "on-machines", resource="story", n_steps=N_STEPS)
    job = training.job
    with UndisturbedRun(tmp_path, N_STEPS) as undisturbed, training.watched():
        resources.set_capacity(V5E, 0)
        # Longer than the operator looks away from a request that waits.
        cloud.do("set_timings", provisioning_s=8)
        resources.apply(training.manifest)
        resource = resources.create("story", slices={"autocheckpointEnabled": True})
        resource.until_state("WaitingForResources")
        job.until_condition("Suspended", "True", "WaitingForQueuedResource")
        resources.set_capacity(V5E, None)
        resource.until_state("Provisioning")
        resource.until_state("Active")
        cloud.do("set_timings", **TIMINGS)
        wait_provided(resource, "default-story")
        (first_machine,) = resources.list_joined("story")

        training.until_trains()
        assert training.read_log().latest is None
        announced_s = time.time()
        cloud.do("announce_maintenance", node="default-story", starts_in_s=NOTICE_S)
        saved = training.until_saved_ahead()
        assert resource.condition("MaintenanceScheduled") == ("True", "MaintenanceAnnounced")
        latest = training.read_log().latest
        assert latest is not None
        assert latest.step == saved < N_STEPS
        assert time.time() < announced_s + NOTICE_S

        cloud.do("preempt", node="default-story")
        wait_provided(resource, "default-story-r1")
        (second_machine,) = resources.list_joined("story")
        assert second_machine != first_machine
        assert resources.in_cloud() == {"default-story-r1": "ACTIVE"}
        status = training.until_complete()
        losses = undisturbed.losses()

    before, after = training.pods
    assert (training.nodes[before], training.nodes[after]) == (first_machine, second_machine)
    resumed_from = training.pods[after][0] - 1
    assert status["checkpoint"]["restored"]["step"] == status["attempts"][-1]["fromStep"] == resumed_from
    assert resumed_from in {record.step for record in training.read_log().commits.values()}
    assert saved <= resumed_from <= training.pods[before][-1]
    assert {step: {loss} for step, loss in losses.items()} == training.losses
    assert {attempt.get("cause") for attempt in status["attempts"][:-1]} == {"SpotPreemption"}
    assert status["restarts"] == {
        "total": 1,
        "byCause": [{"cause": "SpotPreemption", "count": 1, "countedTowardsLimit": 0}],
    }
    events = set(resource.events())
    assert {"WaitingForResources", "Provisioning", "Active"} <= events
    # By what the operator saw first: the node's state, or that of the whole resource a few seconds later.
    assert {"Preempted", "Suspended"} & events


def test_two_trainings_on_one_resource_save_wait_and_go_on_exactly_whatever_becomes_of_it(
    resources: QueuedResources, tmp_path: Path
) -> None:
    """It has a guaranteed slice for each of them.

    First, maintenance of one slice begins, which ends its processes and doesn't give it back: that costs both. Then
    somebody deletes it.
    """
    trainings = [
        Training(
            resources.cluster, name, resource="shared", n_steps=N_STEPS_SHARED, pause_s=0.4, own_grace=False
        )
        for name in ("shares-a", "shares-b")
    ]
    with UndisturbedRun(tmp_path, N_STEPS_SHARED) as undisturbed, contextlib.ExitStack() as stack:
        for training in trainings:
            stack.enter_context(training.watched())
        resources.apply(*(training.manifest for training in trainings))
        until_waiting(trainings, "QueuedResourceNotFound")
        resource = resources.create("shared", **GUARANTEED)
        until_waiting(trainings, "WaitingForQueuedResource")
        wait_provided(resource, "default-shared")
        until_all_train_there(resources, trainings, pod=1)
        assert resource.status()["autocheckpoint"] == "On", "nobody has asked for it"
        for training in trainings:
            assert training.read_graces() == (AUTOCHECKPOINT_GRACE_S, AUTOCHECKPOINT_GRACE_S)
            assert training.job.status()["checkpoint"]["autocheckpoint"] == "On"

        for node in resources.cloud_nodes():
            resources.cloud.do("announce_maintenance", node=node, starts_in_s=NOTICE_S)
        saved = [training.until_saved_ahead() for training in trainings]
        maintained = find_training_on(resources, trainings, "default-shared-0")
        resources.cloud.do(
            "announce_maintenance", node="default-shared-0", starts_in_s=1, lasts_s=1, ends_in="TERMINATED"
        )
        wait_provided(resource, "default-shared-r1")
        until_all_train_there(resources, trainings, pod=2)

        resources.delete(["shared"])
        until_waiting(trainings, "QueuedResourceNotFound")
        told = [training.read_log().latest for training in trainings]
        resources.create("shared", **GUARANTEED)
        statuses = [training.until_complete() for training in trainings]
        losses = undisturbed.losses()

    for training, at_first, at_last, status in zip(trainings, saved, told, statuses, strict=True):
        first, second, third = training.pods.values()
        assert first[-1] >= at_first
        assert second[0] > at_first
        if training is maintained:
            assert second[0] > first[-1], "its machine has waited for its last save"
        assert at_last is not None
        # It was told, and has lost nothing. (The last lines of a pod may go with it.)
        assert third[0] == at_last.step + 1 > second[-1]
        assert training.losses == {step: {losses[step]} for step in training.losses}
        # Pods that are started again before the machine is down end with it, for the same reason.
        causes = [cause for cause, _ in groupby(attempt.get("cause") for attempt in status["attempts"])]
        assert causes == ["Maintenance", "Requested", None]
        assert "QueuedResource shared was deleted" in status["attempts"][-2]["message"]
        assert [entry["countedTowardsLimit"] for entry in status["restarts"]["byCause"]] == [0, 0]


def until_waiting(trainings: list[Training], reason: str) -> None:
    for training in trainings:
        training.job.until_condition("Suspended", "True", reason)


def find_training_on(resources: QueuedResources, trainings: list[Training], slice_id: str) -> Training:
    """Find the training whose last pod is on this slice."""
    nodes = resources.list_joined("shared").items()
    (name,) = (n for n, raw in nodes if raw["metadata"]["labels"]["stepkeeper.dev/slice"] == slice_id)
    return next(training for training in trainings if list(training.nodes.values())[-1] == name)


def until_all_train_there(resources: QueuedResources, trainings: list[Training], *, pod: int) -> None:
    """Wait until the n-th pods of all train, each on a machine of its own."""
    for training in trainings:
        training.until_trains(pod=pod)
    nodes = [list(training.nodes.values())[-1] for training in trainings]
    assert sorted(nodes) == sorted(resources.list_joined("shared"))
